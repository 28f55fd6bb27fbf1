"""The adapter's text, actions and refusals; best actions by hand."""

import numpy as np
import pytest

from envs.gymnasium import Gymnasium, best_actions, observed
from rl_jax.types import Action

BLACKJACK = {"id": "Blackjack-v1", "split_by": "seed", "actions": ("stick", "hit")}


def begun(config):
    task = Gymnasium.tasks({"num_tasks": 3, "eval_size": 2, **config}, "train")[0]
    env = Gymnasium()
    return env, env.reset(task, 0)


def test_numbers_are_the_observation_and_words_the_actions():
    env, seen = begun(BLACKJACK)
    assert seen.messages[0].content.startswith("Answer with one of these actions: stick, hit.\n\n")
    numbers = [int(word) for word in seen.messages[0].content.split("\n\n")[1].split()]
    assert len(numbers) == 3 and numbers[0] <= 21
    ignored = env.step(Action("sticky, unstick"))
    assert ignored.info == {"invalid_moves": 1.0} and ignored.reward == 0.0 and not ignored.done
    ended = env.step(Action("hit? no: STICK."))
    assert ended.done and ended.reward in (-1.0, 0.0, 1.0)
    env.close()


def test_colours_of_a_drawing_are_told():
    _, seen = begun({"id": "Taxi-v4"})
    assert "[yellow" in seen.messages[0].content and "\x1b" not in seen.messages[0].content


def test_eval_is_not_train():
    splits = [Gymnasium.tasks({"id": "Taxi-v4", "num_tasks": 20}, s) for s in Gymnasium.splits]
    seeds = [{task.payload["seed"] for task in tasks} for tasks in splits]
    assert len(seeds[0]) == 20 and len(seeds[1]) == 32 and not seeds[0] & seeds[1]


def test_observations_as_text():
    assert observed({"a": np.array([1.0, 0.5]), "b": (3, "x")}) == "a: 1 0.5\nb: 3 x"
    with pytest.raises(ValueError, match="300 numbers is no text; at most 256"):
        observed(np.zeros(300))


def test_best_actions_by_hand():
    """0 -> 1 -> 2 by action 1, which pays 1 at the end; action 0 stays and pays nothing, or 0.1 and ends."""
    table = {
        0: {0: [(1.0, 0, 0.1, True)], 1: [(1.0, 1, 0.0, False)]},
        1: {0: [(1.0, 1, 0.0, False)], 1: [(0.5, 2, 1.0, True), (0.5, 1, 0.0, False)]},
        2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, -1.0, True)]},
    }
    assert best_actions(table).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "config, told",
    [
        ({}, "id='' names no environment"),
        ({"id": "Chess-v0"}, "id='Chess-v0' cannot be found"),
        ({"id": "Pendulum-v1"}, "only Discrete ones can be named by a word"),
        ({"id": "Taxi-v4", "actions": ("north",)}, "must be 6 different names"),
        ({"id": "Blackjack-v1", "actions": ("a", "A")}, "must be 2 different names"),
        ({"id": "Taxi-v4", "observe": "smell"}, "observe='smell' is not one of auto, text, ansi"),
        ({"id": "Taxi-v4", "kwargs": [1]}, "kwargs=[1] must be a mapping"),
        ({"id": "CliffWalking-v1"}, "only 1 of 96 tasks begin differently"),
    ],
)
def test_what_cannot_be_played_is_told(config, told):
    with pytest.raises(ValueError) as error:
        Gymnasium.tasks(config, "train")
    assert told in str(error.value)
