"""What a worker refuses when it starts: a class or a scorer that lacks what is called later, told by its name."""

import time

import pytest

from rl_jax.rollout.env_process import NotMade, Worker
from rl_jax.types import Reward, StepResult


class Whole:
    @classmethod
    def tasks(cls, cfg, split):
        return []

    def reset(self, task, seed):
        return StepResult(())

    def step(self, action):
        return StepResult(())

    def close(self): ...


class WithArgument(Whole):
    def __init__(self, cfg): ...


class Awaited(Whole):
    async def step(self, action): ...


class Unclosed:
    tasks, reset, step = Whole.tasks, Whole.reset, Whole.step


class NoMethod:
    pass


class TurnsOnly:
    def score_turn(self, task, episode, turn):
        return Reward(0.0, {}, (), "scored", "")


def made(env="", scorer="", of_turns=()):
    source = {"tag": "t", "env": env, "target": f"{__name__}:{env}", "config": {}, "reward": "env"}
    return Worker(
        {
            "max_obs_bytes": 1,
            "sources": [source] if env else [],
            "scorers": {scorer: f"{__name__}:{scorer}"} if scorer else {},
            "options": {scorer: {}},
            "of_turns": list(of_turns),
        }
    )


@pytest.mark.parametrize(
    "env, told",
    [
        ("Unclosed", "Unclosed has no close(); it needs tasks, reset, step, close"),
        ("Awaited", "step() of Awaited is async; write plain code, which may block"),
        (
            "WithArgument",
            "WithArgument() missing a required argument: 'cfg'; an instance is made without arguments",
        ),
        ("time", "time has no tasks()"),
        ("Whol", "has no Whol; use Whole"),
    ],
)
def test_a_class_that_is_no_environment_is_told_when_the_worker_starts(env, told):
    with pytest.raises(NotMade) as caught:
        made(env)
    assert f"environment {env}: " in str(caught.value) and told in str(caught.value)
    assert made("Whole").offers()["envs"]["t"] == {"splits": ["train", "eval"], "script": False}
    assert time.time() > 0  # `time` above is this module's, no class


def test_a_scorer_without_its_method_is_told_when_the_worker_starts():
    with pytest.raises(NotMade, match=r"NoMethod has no score\(\); it needs score"):
        made(scorer="NoMethod")
    with pytest.raises(NotMade, match=r"NoMethod has no score_turn\(\)"):
        made(scorer="NoMethod", of_turns=["NoMethod"])
    turns = made(scorer="TurnsOnly", of_turns=["TurnsOnly"])
    assert turns.offers() == {"envs": {}, "of_turns": ["TurnsOnly"]}
