"""The fake sampler keeps the promises that serving makes."""

import asyncio

import numpy as np
import pytest

from rl_jax.testing.fake_sampler import FakeSampler, spans_of
from rl_jax.types import FinishReason, Sampler, TurnError, TurnRequest, VersionSpan


def request(uid="r/0/0/0", turn=0, num_context=5, **changes):
    fields = {
        "uid": uid, "attempt": 0, "turn": turn, "tokens": np.arange(num_context, dtype=np.int32),
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 8, "stop_token_ids": (7, 2),
        "stop": (), "seed": 3, "tag": "echo",
    }  # fmt: skip
    return TurnRequest(**{**fields, **changes})


def generate(sampler, *requests):
    async def all_of_them():
        return await asyncio.gather(*(sampler.generate(r) for r in requests))

    return asyncio.run(all_of_them())


def test_it_is_a_sampler_and_tokens_depend_on_seed_and_index_only():
    assert isinstance(FakeSampler(), Sampler)
    alone = generate(FakeSampler(), request())[0]
    beside = generate(FakeSampler(), request("x"), request(), request("y", seed=9))
    assert np.array_equal(alone.tokens, beside[1].tokens) and len(alone.tokens) == 8
    assert not np.array_equal(alone.tokens, beside[2].tokens)
    rest = generate(FakeSampler(), request(token_index=3, max_new_tokens=5))[0]
    assert np.array_equal(rest.tokens, alone.tokens[3:])


def test_each_way_to_end():
    def finish(**kwargs):
        changes = kwargs.pop("request", {})
        turn = generate(FakeSampler(**kwargs), request(**changes))[0]
        return turn.finish, len(turn.tokens)

    assert finish(script=lambda r: [9, 7, 9]) == (FinishReason.STOP, 2)
    assert finish(script=lambda r: [9, 9, 2]) == (FinishReason.EOS, 3)
    assert finish() == (FinishReason.LENGTH, 8)
    assert finish(context=9) == (FinishReason.CONTEXT, 4)
    with pytest.raises(TurnError, match="context at fake: 9 tokens of 9"):
        generate(FakeSampler(context=9), request(num_context=9))


def test_abort_keeps_what_was_sampled():
    sampler = FakeSampler(block=2, on_block=lambda r, n: n == 4 and sampler.abort(r.uid, "x"))
    turn = generate(sampler, request())[0]
    assert turn.finish is FinishReason.ABORT and len(turn.tokens) == 6
    assert sampler.aborted == [("r/0/0/0", "x")]


def test_versions_and_mixed_contexts_are_labelled_by_token():
    sampler = FakeSampler(block=3, on_block=lambda r, n: n == 3 and sampler.publish(4))
    turn = generate(sampler, request())[0]
    assert turn.spans == (VersionSpan(0, 3, 0), VersionSpan(3, 8, 4))
    assert turn.context_mixed.tolist() == [False] * 3 + [True] * 5
    assert spans_of([]) == ()


def test_sessions_live_from_first_request_to_release():
    sampler = FakeSampler()
    first, second = request(num_context=5), request(turn=1, num_context=20)
    turns = [*generate(sampler, first), *generate(sampler, second)]
    assert [turn.cached_prompt for turn in turns] == [0, 13]
    assert len(turns[1].prompt_tokens) == 7 and sampler.live == ("r/0/0/0#0",)
    sampler.release("r/0/0/0#0")
    assert sampler.live == () and sampler.peak_live == 1
