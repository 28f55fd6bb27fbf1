"""Episodes with tools, in the house's chat format and in every family's: calls, failed ones, and the tokens kept."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.calculator import Calculator
from rl_jax.ledger import EpisodeRef
from rl_jax.rewards.check import from_steps
from rl_jax.rollout.assembly import assemble
from rl_jax.rollout.episode import Episode, EpisodeRules, EpisodeTools, run_episode
from rl_jax.rollout.scripted import ScriptPlan, scripted_episodes
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.types import Message, Outcome, StepResult, ToolCall
from tests.rollout.doubles import RENDERER, SETTINGS
from tests.tokens.families import FAMILIES, renderer_of

RULES = EpisodeRules.of(
    replace(SETTINGS, max_new_tokens=300, episode_timeout_s=20.0),
    context=20_000,
    turn_deadline_s=5.0,
)
TASKS = [
    replace(task, env="calculator") for task in Calculator.tasks({"num_tasks": 4, "eval_size": 4}, "train")
]  # fmt: skip


def renderer_named(name):
    return RENDERER if name == "byte" else renderer_of(name)


NAMES = ("byte", *sorted(FAMILIES))


class Stepped(Calculator):
    """Keeps the actions that reached it."""

    actions: list = []

    def step(self, action):
        self.actions.append(action)
        return super().step(action)


def play(renderer, sampler, task, env=Stepped, **rules):
    """(episode, counts, actions that reached the environment)"""
    counts, closers = Counter(), []
    pool = FakePool({"calculator": env, "chatter": env})
    ref = EpisodeRef("r/0/0/0", 0, "r/0/0", 0, 0, 0, task.tag)
    episode = Episode(ref, task, 7, replace(RULES, **rules))

    def count(name):
        counts[name] += 1

    def close(handle):
        closers.append(asyncio.ensure_future(handle.close()))

    async def run():
        tools = EpisodeTools(sampler, pool.open, close, renderer, count)
        await run_episode(episode, tools, lambda: None)
        await asyncio.gather(*closers)

    Stepped.actions = []
    sampler.context = rules.get("context", 10**6)
    asyncio.run(run())
    return episode, counts, Stepped.actions


def saying(renderer, *turns):
    """A sampler whose turns are these texts."""
    return FakeSampler(script=lambda r: renderer.said(Message("assistant", turns[r.turn])))


@pytest.mark.parametrize("name", NAMES)
def test_a_script_solves_the_task_with_its_tool(name):
    renderer = renderer_named(name)
    pool = FakePool({"calculator": Calculator})
    episodes = asyncio.run(scripted_episodes(pool, TASKS, renderer, RULES, ScriptPlan(4, 1.0, 3)))
    for episode in episodes:
        num_steps = len(episode.task.payload["problem"]) // 2
        assert (episode.outcome, len(episode.turns)) == (Outcome.OK, num_steps + 1)
        assert episode.steps[-1].info["success"] == 1.0
        assert (
            episode.steps[-1].info["calls"] == num_steps
            and not episode.steps[-1].info["failed_calls"]
        )
        told = renderer.tokenizer.decode(episode.context())
        for step in episode.steps[:-1]:
            assert step.messages[0].content in told
        trajectory = assemble(episode.close(), from_steps([s.reward for s in episode.steps]))
        assert trajectory.reward.value == 1.0
        sampled = np.concatenate([turn.tokens for turn in episode.turns])
        assert np.array_equal(trajectory.tokens[trajectory.loss_mask], sampled)


BAD = '<tool_call>{"name": "calculator", "arguments": {"expression": </tool_call>'


def test_a_malformed_call_is_answered_to_the_policy_and_not_to_the_environment():
    task = TASKS[0]
    sampler = saying(RENDERER, BAD, f"Answer: {task.payload['answer']}")
    episode, counts, actions = play(RENDERER, sampler, task)
    assert [action.text for action in actions] == [f"Answer: {task.payload['answer']}"]
    assert counts["episodes/malformed_calls"] == 1 and len(episode.turns) == 2
    assert episode.outcome is Outcome.OK and [s.reward for s in episode.steps] == [0.0, 1.0]
    told = RENDERER.tokenizer.decode(episode.turns[1].prompt_tokens)
    assert told.startswith("<|tool|>The tool call could not be read: it is no JSON")
    assert '"expression": ' in told and told.endswith("<|end|><|assistant|>")
    assert episode.texts[0] == BAD  # all that was said


@pytest.mark.parametrize(
    "said, why",
    [
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', "there is no tool 'search'"),
        ('<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', "needs the argument"),
        ("<tool_call>" + "x" * 5000, "(5000 characters)"),
    ],
)
def test_calls_of_no_tool_are_told_with_a_bounded_echo(said, why):
    episode, counts, actions = play(
        RENDERER, saying(RENDERER, said, "Answer: 1"), TASKS[0], max_new_tokens=6000
    )
    told = RENDERER.tokenizer.decode(episode.turns[1].prompt_tokens)
    assert why in told and len(told) < 1100
    assert counts["episodes/malformed_calls"] == 1 and len(actions) == 1


def test_a_task_without_tools_gets_all_that_was_said():
    task = replace(TASKS[0], tools=())
    _, counts, actions = play(RENDERER, saying(RENDERER, BAD, "Answer: 1"), task)
    assert [a.text for a in actions] == [BAD, "Answer: 1"] and actions[0].tool_calls == ()
    assert not counts["episodes/malformed_calls"]


def test_every_cut_of_a_turn_that_calls_is_counted_and_flagged():
    """L19: a call that was cut is no call; what cut it is told apart."""
    whole = RENDERER.said(
        Message("assistant", "", (ToolCall("calculator", {"expression": "1 + 1"}),))
    )
    answer = RENDERER.said(Message("assistant", f"Answer: {TASKS[0].payload['answer']}"))
    prompt = len(RENDERER.first(TASKS[0].messages, TASKS[0].tools))

    def ends(turns, **rules):
        sampler = FakeSampler(script=lambda r: turns[min(r.turn, len(turns) - 1)])
        episode, counts, _ = play(RENDERER, sampler, TASKS[0], **rules)
        trained = assemble(episode.close(), from_steps([s.reward for s in episode.steps]))
        assert trained.num_trained == sum(len(turn.tokens) for turn in episode.turns)
        finishes = [turn.finish.value for turn in episode.turns]
        assert all(counts[f"turns/{f}"] == finishes.count(f) for f in set(finishes))
        return episode.outcome, episode.truncated_by, finishes, counts["episodes/malformed_calls"]

    ok, cut = Outcome.OK, Outcome.TRUNCATED
    size = len(whole)
    assert ends([whole, answer]) == (ok, None, ["stop", "stop"], 0)
    assert ends([whole, answer], max_new_tokens=size - 1) == (ok, None, ["length", "stop"], 0)
    assert ends([whole, answer], max_new_tokens=size - 8) == (ok, None, ["length", "stop"], 1)
    assert ends([whole], max_turns=2) == (cut, "turn_limit", ["stop", "stop"], 0)
    assert ends([whole], max_turns=1, max_new_tokens=size - 8) == (cut, "turn_limit", ["length"], 1)
    assert ends([whole], context=prompt + size - 8) == (cut, "context", ["context"], 1)
    assert ends([whole], context=prompt + size + 2) == (cut, "context", ["stop"], 0)


# --- L5 --------------------------------------------------------------------------------------------------------------


class Chatter(Calculator):
    """Says whatever its task's payload holds, turn by turn."""

    def reset(self, task, seed):
        self._left = list(task.payload["script"])
        return StepResult(())

    def step(self, action):
        if not self._left:
            return StepResult((), 0.0, True)
        messages = self._left.pop(0)
        return StepResult(tuple(Message(role, text) for role, text in messages), 0.0)


SPIKES = ["<|im_end|>", "<tool_call>", "</think>", "<|eot_id|>", "[/INST]", "<end_of_turn>", "\ud835", "\x00", "👩‍👩‍👧",
          "e\u0301", "\r\n", "\n\n", " ", "", "<think>\nx\n</think>\n\n", '{"a": "b"}']  # fmt: skip
WORDS = st.lists(st.one_of(st.text(max_size=6), st.sampled_from(SPIKES)), max_size=4).map("".join)
ANSWERS = st.one_of(
    st.lists(st.tuples(st.just("tool"), WORDS), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), WORDS), max_size=3),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(NAMES), WORDS, st.lists(ANSWERS, max_size=4), st.integers(0, 2**32))
def test_trained_tokens_are_those_that_were_sampled_whatever_is_said(name, question, script, seed):
    """L5: random conversations with tools, random tokens as turns; every context extends the one before."""
    renderer, rng = renderer_named(name), random.Random(seed)
    task = replace(
        TASKS[0],
        messages=(Message("user", f"q{question}"),),
        payload={"script": script},
        max_turns=9,
    )
    vocab = renderer.tokenizer.vocab_size
    calls = renderer.said(Message("assistant", "", (ToolCall("calculator", {"expression": "1"}),)))
    stops = renderer.stop_token_ids

    def turn(request):
        if rng.random() < 0.5:
            return calls
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(0, 8))]
        return [*(t for t in tokens if t not in stops), rng.choice([*stops, 0, 5])]

    said = {}
    sampler = FakeSampler(script=lambda r: said.setdefault(r.turn, turn(r)), alphabet=range(vocab))
    episode, counts, _ = play(renderer, sampler, task, Chatter, max_new_tokens=60)
    assert episode.failure is None, episode.failure
    trajectory = assemble(episode.close(), from_steps([s.reward for s in episode.steps]))
    at = 0
    for request, turn_ in zip(sampler.requests, episode.turns, strict=True):
        assert np.array_equal(request.tokens, trajectory.tokens[: len(request.tokens)])
        at = len(request.tokens)
        assert np.array_equal(trajectory.tokens[at : at + len(turn_.tokens)], turn_.tokens)
    sampled = np.concatenate([turn_.tokens for turn_ in episode.turns])
    assert np.array_equal(trajectory.tokens[trajectory.loss_mask], sampled)
    assert len(episode.turns) <= len(script) + 1 + counts["episodes/malformed_calls"]
