"""A prefill server hands prefixes to a decode server on another device."""

from concurrent.futures import Future

import pytest

from rl_jax.types import Prefix, TurnError


def ask(server, request, target) -> Future:
    future = Future()
    server.submit(request, target, lambda *result: future.set_result(result))
    return future


def test_turn_over_a_handed_prefix_equals_one_extended_locally(kit):
    d, p = kit.decode(), kit.prefill()
    contexts = {f"e{i}": list(range(i, i + n)) for i, n in enumerate((2, 9, 40, 17))}
    futures = {
        uid: ask(p, kit.request(uid, context), d.server) for uid, context in contexts.items()
    }
    for uid, context in contexts.items():
        prefix, times_s = futures[uid].result(kit.PATIENCE_S)
        assert isinstance(prefix, Prefix)
        assert (prefix.num_tokens, prefix.version) == (len(context) - 1, 0)
        assert set(times_s) == {"queue", "prefill", "transfer"}
        turn = d.turns.run(kit.request(uid, context), prefix)
        assert turn.tokens.tolist() == d.engine.expected(context, 6)
        assert turn.cached_prompt == 0
    stats = d.server.stats()
    assert stats["received_tokens"] == p.stats()["prefill_tokens"] == 1 + 8 + 39 + 16
    assert stats["prefill_tokens"] == stats["append_tokens"] == stats["recompute_tokens"] == 0
    assert p.num_jobs == 0


def test_prefix_of_another_version_is_refused_or_marked(kit):
    d, p = kit.decode(), kit.prefill()
    context = [4, 5, 6, 7]
    prefix, _ = ask(p, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
    kit.commit(d.server, 1)
    turn = d.turns.run(kit.request(tokens=context), prefix)
    assert turn.tokens.tolist() == d.engine.expected(context, 6, offset=1)
    assert not turn.context_mixed.any()
    stats = d.server.stats()
    assert (stats["refused_prefixes"], stats["recompute_tokens"]) == (1, 3)
    kit.commit(d.server, 2, kv="keep")
    turn = d.turns.run(kit.request("b", context), prefix)
    assert turn.context_mixed.all()
    assert turn.tokens[0] == (sum(context) + 2) % 97  # only the last token's KV is of version 2


def test_prefix_of_other_tokens_is_refused(kit):
    d, p = kit.decode(), kit.prefill()
    prefix, _ = ask(p, kit.request(tokens=[4, 5, 6, 7]), d.server).result(kit.PATIENCE_S)
    turn = d.turns.run(kit.request(tokens=[4, 9, 6, 7]), prefix)
    assert turn.tokens.tolist() == d.engine.expected([4, 9, 6, 7], 6)
    assert d.server.stats()["refused_prefixes"] == 1


def test_commit_between_chunks_starts_half_done_prefixes_anew(kit):
    d, p = kit.decode(), kit.prefill()
    inner, done = p.engine.append, []

    def append(*args):
        if not done:  # the first chunk of two: the commit is obeyed before the second
            done.append(kit.commit_later(p, 5))
        return inner(*args)

    p.engine.append = append
    context = list(range(30))
    prefix, _ = ask(p, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
    assert prefix.version == 5
    assert (p.stats()["recompute_tokens"], p.stats()["prefill_tokens"]) == (16, 29)
    kit.commit(d.server, 5)
    turn = d.turns.run(kit.request(tokens=context), prefix)
    assert turn.tokens.tolist() == d.engine.expected(context, 6, offset=5)


def test_more_prefixes_than_it_has_pages_for_take_their_turn(kit):
    """Four contexts in pieces at once are all that its cache holds; those of a high priority go first."""
    d, p = kit.decode(), kit.prefill(version=None)
    contexts = {f"e{i}": list(range(i, i + 41)) for i in range(9)}
    futures = {
        uid: ask(p, kit.request(uid, context, priority=int(uid[1])), d.server)
        for uid, context in contexts.items()
    }
    order = []
    for uid, future in futures.items():
        future.add_done_callback(lambda _, uid=uid: order.append(uid))
    kit.commit(p, 0)
    for uid, context in contexts.items():
        prefix, _ = futures[uid].result(kit.PATIENCE_S)
        turn = d.turns.run(kit.request(uid, context), prefix)
        assert turn.tokens.tolist() == d.engine.expected(context, 6)
        d.server.release(f"{uid}#0")
    assert order == sorted(contexts, reverse=True)
    assert sorted(p._free_rows) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "kind"), [(range(64), "context"), ([1], "unsupported"), ([], "unsupported")]
)
def test_contexts_without_a_prefix_are_refused(kit, tokens, kind):
    d, p = kit.decode(), kit.prefill()
    error, _ = ask(p, kit.request(tokens=tokens), d.server).result(kit.PATIENCE_S)
    assert error.kind == kind


def test_every_job_is_answered_whatever_ends_it(kit):
    d, p = kit.decode(), kit.prefill(version=None)  # without weights nothing is computed
    aborted = ask(p, kit.request("aborted"), d.server)
    late = ask(p, kit.request("late", deadline_s=0.01), d.server)
    many = [ask(p, kit.request(f"e{i}"), d.server) for i in range(16)]
    p.abort("aborted", "test")
    results = [f.result(kit.PATIENCE_S)[0] for f in (aborted, late)]
    assert [r.kind for r in results] == ["closed", "deadline"]
    p.fence("out of memory")
    kinds = [f.result(kit.PATIENCE_S)[0].kind for f in many]
    assert kinds == ["closed"] * 14 + ["queue_full"] * 2
    refused, _ = ask(p, kit.request("next"), d.server).result(kit.PATIENCE_S)
    assert "out of memory" in str(refused)
    kit.commit(p, 1)
    assert isinstance(ask(p, kit.request("again"), d.server).result(kit.PATIENCE_S)[0], Prefix)
    p.engine.append = None
    error, _ = ask(p, kit.request("last"), d.server).result(kit.PATIENCE_S)
    assert isinstance(error, TurnError) and error.kind == "engine" and "TypeError" in str(error)
    assert p.num_jobs == 0
