"""Which hardware class a tag prefers, as a pure decision: by hand, and under loads that do not change."""

import random
from types import SimpleNamespace

import pytest

from rl_jax.cluster import InProcCluster
from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.serve import Router
from rl_jax.serve.affinity import Affinity, Band, Price, busiest_s
from rl_jax.settings import EngineSettings, MeshSettings, PoolSettings, ServeSettings, Settings
from rl_jax.testing.tiny_model import tiny_model

# A token takes 1 ms on `fast` and 8 on `slow`; a step 10 on both but for a tenth.
PRICES = {"fast": Price(0.001, 0.011, 4), "slow": Price(0.008, 0.010, 6)}
BAND = Band(looks=3, rest=10)
# (computed, sampled) tokens of a turn
PREFILL, DECODE = (4000, 40), (100, 2000)


def after(looks, turns, prices=PRICES, affinity=None, noise=0.0, seed=0):
    """Affinity after so many looks, with one turn of each tag at every look."""
    rng = random.Random(seed)
    affinity = affinity or Affinity(tuple(turns), BAND)
    for _ in range(looks):
        for tag, (computed, sampled) in turns.items():
            share = 1 + noise * rng.uniform(-1, 1)
            affinity = affinity.turn(tag, int(computed * share), int(sampled * share))
        noisy = {
            name: Price(p.token_s * (1 + noise * rng.uniform(-1, 1)), p.step_s, p.num)
            for name, p in prices.items()
        }
        affinity = affinity.look(noisy, 4.0)
    return affinity


def test_prompts_go_where_computing_is_cheap_and_answers_elsewhere():
    found = after(60, {"lake": PREFILL, "math": DECODE}, noise=0.1)
    assert found.assigned == {"lake": "fast", "math": "slow"} and found.moves <= 2
    assert after(600, {"lake": PREFILL, "math": DECODE}, affinity=found, noise=0.3).moves <= 3


def test_nothing_is_assigned_before_enough_was_seen():
    turns = {"lake": PREFILL, "math": DECODE}
    assert after(7, turns).assigned == {}
    unmeasured = {**PRICES, "slow": Price(None, 0.01, 6)}
    affinity = Affinity(("lake", "math"), BAND)
    for _ in range(50):
        affinity = affinity.turn("lake", *PREFILL).look(PRICES, 4.0)
    assert affinity.assigned == {}  # math was never seen
    for _ in range(50):
        affinity = affinity.turn("math", *DECODE).look(unmeasured, 4.0)
    assert affinity.assigned == {}


@pytest.mark.parametrize(
    "prices", [{"one": Price(0.001, 0.01, 4)}, dict.fromkeys("ab", Price(0.001, 0.01, 3))]
)
def test_without_a_difference_every_pool_will_do(prices):
    found = after(200, {"lake": PREFILL, "math": DECODE}, prices, noise=0.02)
    assert found.assigned == {} and found.moves == 0


def test_another_load_is_followed():
    found = after(60, {"lake": PREFILL, "math": DECODE})
    turned = after(2000, {"lake": DECODE, "math": PREFILL}, affinity=found)
    assert turned.assigned == {"lake": "slow", "math": "fast"} and turned.moves <= found.moves + 3


def test_the_busiest_class_is_what_an_assignment_takes():
    costs = [{"fast": 8.0, "slow": 40.0}, {"fast": 12.0, "slow": 10.0}]
    assert busiest_s(("fast", "slow"), costs, PRICES) == 2.0
    assert busiest_s(("fast", "fast"), costs, PRICES) == 5.0
    assert busiest_s(("fast", ""), costs, PRICES) == pytest.approx(8 / 4 + 12 / 10)
    assert busiest_s(("gone", "slow"), costs, PRICES) == pytest.approx(40 / 10 + 10 / 6)


def test_many_tags_are_moved_one_at_a_time():
    turns = {f"t{i}": PREFILL if i % 2 else DECODE for i in range(10)}
    found = after(80, turns)
    names = {
        kind: {found.assigned.get(t) for t in turns if turns[t] is kind}
        for kind in (PREFILL, DECODE)
    }
    # No single move is better, which need not be the best of all.
    assert "fast" in names[PREFILL] <= {"fast", None} and "slow" in names[DECODE] <= {"slow", None}


def test_a_cluster_asks_for_it_under_auto_only():
    model, _ = tiny_model()
    pools = [PoolSettings(name, "decode", hardware=name) for name in ("H800", "H20")]
    plan = MeshPlan.from_settings(MeshSettings(pools=(*pools, PoolSettings("train", "train"))))
    engine = EngineSettings(slots=2, context=64, page_size=16, chunk_sizes=(16,))
    tags = {}
    for word in ("declared", "auto"):
        settings = Settings(engine=engine, serve=ServeSettings(affinity=word))
        cluster = InProcCluster(plan, build_meshes(plan).servers, model, settings)
        affinity = cluster.router._affinity
        tags[word] = affinity and affinity.tags
        assert cluster.counters()["affinity_moves"] == 0
    assert tags == {"declared": None, "auto": ("frozen_lake",)}


def test_a_tag_s_pools_are_those_of_its_class_and_all_where_none_of_them_lives():
    servers = [
        SimpleNamespace(name=f"{pool}.0", pool=pool, hardware=hardware, fenced=None)
        for pool, hardware in (("a", "fast"), ("b", "slow"), ("c", "fast"))
    ]
    router = SimpleNamespace(_affinity=Affinity(assigned={"lake": "fast"}))
    chosen = lambda tag: [server.pool for server in Router._choices(router, tag, servers)]
    assert chosen("lake") == ["a", "c"] and chosen("math") == ["a", "b", "c"]
    for server in servers[::2]:
        server.fenced = "gone"
    assert chosen("lake") == ["b"]
