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


def check_trained(episode, requests, counts, rewrites):
    """Element by element: each turn was asked with what its sample holds, and is trained as it was sampled."""
    trajectory = assemble(episode.close(), from_steps([s.reward for s in episode.steps]))
    tokens, mask = trajectory.tokens, trajectory.loss_mask
    num_trained = 0
    for i, (request, turn) in enumerate(zip(requests, episode.turns, strict=True)):
        start = trajectory.sample_starts[sum(new <= i for new in episode.new_samples)]
        end = start + len(request.tokens)
        assert np.array_equal(tokens[start:end], request.tokens)
        assert np.array_equal(tokens[end : end + len(turn.tokens)], turn.tokens)
        assert mask[end : end + len(turn.tokens)].all()
        num_trained += len(turn.tokens)
    assert mask.sum() == num_trained
    failures = counts["episodes/rewritten_history"]
    assert failures == len(trajectory.sample_starts) - 1 and (rewrites or not failures)
    return failures


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(NAMES), WORDS, st.lists(ANSWERS, max_size=4), st.integers(0, 2**32), st.booleans()
)  # fmt: skip
def test_trained_tokens_are_those_that_were_sampled_whatever_is_said(
    name, question, script, seed, rewrites
):
    """L5: random conversations with tools, random tokens as turns; every context extends the one before, or begins a
    sample that is counted."""
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
    rules = {"max_new_tokens": 60, "rewrites": rewrites}
    episode, counts, _ = play(renderer, sampler, task, Chatter, **rules)
    assert episode.failure is None, episode.failure
    check_trained(episode, sampler.requests, counts, rewrites)
    assert len(episode.turns) <= len(script) + 1 + counts["episodes/malformed_calls"]


TOOLS_ANSWER = st.lists(st.tuples(st.just("tool"), WORDS), min_size=1, max_size=3)
USER_ANSWERS = st.tuples(st.just("user"), WORDS).map(lambda one: [one])
SYSTEM_FIRST = WORDS.flatmap(lambda w: USER_ANSWERS.map(lambda one: [("system", w), *one]))
# A family -> what may be answered so that its template shows all of the history, whether there may be tools.
SHOWN = {name: (st.one_of(TOOLS_ANSWER, USER_ANSWERS, SYSTEM_FIRST), True) for name in NAMES}
SHOWN["mistral"] = (USER_ANSWERS, False)  # else tools and system move to the last question
del SHOWN["llama2"]  # blanks stand round what was said


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(sorted(SHOWN)), WORDS, st.integers(0, 2**32), st.booleans())
def test_no_bridge_fails_under_either_history(data, name, question, seed, rewrites):
    """L5: calls (one, or several with answers in a row), thoughts, odd unicode, any tokens, turns that end and turns
    that are cut: no context is another than the one that the template shows."""
    renderer, rng = renderer_named(name), random.Random(seed)
    answers, has_tools = SHOWN[name]
    script = data.draw(st.lists(answers, min_size=1, max_size=4))
    task = replace(
        TASKS[0],
        messages=(Message("user", f"q{question}"),),
        payload={"script": script},
        max_turns=9,
        tools=TASKS[0].tools if has_tools else (),
    )
    tokenizer, end = renderer.tokenizer, renderer.stop_token_ids[0]
    vocab, thinks = tokenizer.vocab_size, True
    avoided = {*renderer.stop_token_ids}
    if name == "qwen3":  # which drops thoughts once a user speaks again
        thinks = all(role == "tool" for new in script for role, _ in new)
        avoided |= {tokenizer.control[marker] for marker in ("<think>", "</think>")}
    usable = [i for i in range(vocab) if i not in avoided]

    def turn(request):
        kind = rng.random()
        if kind < 0.4:
            calls = (ToolCall("calculator", {"expression": "1"}),) * rng.randint(1, 2)
            return renderer.said(Message("assistant", "", calls))
        if kind < 0.6 and thinks:
            return renderer.said(Message("assistant", "<think>\nhm\n</think>\n\nSo 4 😀."))
        is_cut = kind > 0.9
        while True:
            tokens = rng.choices(usable, k=60 if is_cut else rng.randint(0, 8))
            text = tokenizer.decode(tokens)
            if text == text.strip():  # Gemma's and Llama's trim what was said
                return tokens if is_cut else [*tokens, end]

    said = {}
    sampler = FakeSampler(script=lambda r: said.setdefault(r.turn, turn(r)), alphabet=range(vocab))
    rules = {"max_new_tokens": 60, "rewrites": rewrites}
    episode, counts, _ = play(renderer, sampler, task, Chatter, **rules)
    assert episode.failure is None, episode.failure
    assert check_trained(episode, sampler.requests, counts, rewrites) == 0
