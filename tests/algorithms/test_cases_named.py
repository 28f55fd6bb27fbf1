"""The worked cases once more, through the named classes and their settings, as a step calls them.

test_cases.py runs the formulas; here is what stands above them: which policy is the old one, what a setting becomes,
in which order weights, masks, KL and shaping act. The policy that sampled is always another than the old one.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS, options
from rl_jax.algorithms.aggregate import token_weights
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.covariance import most_covarying
from rl_jax.algorithms.token_advantages import discounted_returns, whiten
from rl_jax.settings import AlgorithmSettings, KlSettings
from rl_jax.testing.trajectories import fake_group, fake_trajectory
from tests.algorithms.case_losses import LOSSES
from tests.algorithms.case_ops import runs
from tests.algorithms.case_runs import farthest
from tests.algorithms.test_common import make

RECOMPUTE = {"old_policy": "recompute"}
CLIPS = {"clip_low": "clip_low", "clip_high": "clip_high", "clip_c": "dual_clip"}


def weights(p):
    """Settings of a case's importance weights."""
    return {f"correction.{k}": v for k, v in p.items() if v is not None}


def renamed(p, **names):
    return {names[k]: v for k, v in p.items() if k in names and v is not None}


def settings_of(name, own=(), **names):
    """name, and settings from a case's parameters: `names` maps theirs to ours, `own` stands whatever they are."""
    return lambda p: (name, {**dict(own), **renamed(p, **names)})


def decoupled(p):
    mode = {"mask": "mask", "clamp": "truncate"}[p.get("cap_mode", "mask")]
    names = {**CLIPS, "cap": "correction.high", "cap_low": "correction.low"}
    return "decoupled_ppo", {"correction.mode": mode, **renamed(p, **names)}


def full_grpo(p):
    return "grpo", {**RECOMPUTE, **renamed(p, **CLIPS, kl_coef="kl.coef"), **weights(p["tis"])}


def kl(p):
    return "grpo", {"kl.coef": 1.0, "kl.kind": p.get("kind", "k3")}


NAMED = {
    "kl": kl,
    "kl.unbiased": settings_of("grpo", {**RECOMPUTE, "kl.coef": 1.0, "kl.kind": "unbiased"}),
    "loss.cispo": settings_of("cispo", RECOMPUTE, ratio_min="ratio_min", ratio_max="ratio_max"),
    "loss.decoupled_ppo": decoupled,
    "loss.dppo": settings_of(
        "dppo", RECOMPUTE, kind="divergence", div_low="div_low", div_high="div_high",
        ratio_cap="ratio_max",
    ),
    "loss.full_grpo": full_grpo,
    "loss.gmpo": settings_of("gmpo", RECOMPUTE, **CLIPS),
    "loss.gspo": settings_of("gspo", RECOMPUTE, **CLIPS),
    "loss.gspo_token": settings_of("gspo_token", RECOMPUTE, **CLIPS),
    "loss.kimi_seq": settings_of("kimi", RECOMPUTE, tau="tau"),
    "loss.kl_cov": settings_of("kl_cov", RECOMPUTE, coef="cov_coef"),
    "loss.opd_pg": settings_of("opd", cap="ratio_max"),
    "loss.ppo": settings_of("grpo", {**RECOMPUTE, "clip_high": 0.2}, **CLIPS),
    "loss.reinforce": settings_of("dpo"),
    "loss.sapo": settings_of("sapo", RECOMPUTE, tau_pos="tau_pos", tau_neg="tau_neg"),
    "loss.segment_ppo": settings_of("turn_ppo", RECOMPUTE, **CLIPS),
    "loss.sft": settings_of("sft"),
    "loss.tis_pg": settings_of("aipo", rho="ratio_max"),
    "loss.topr": settings_of("topr", level="weight_level"),
    "loss.vespo": settings_of("vespo", RECOMPUTE),
}  # fmt: skip
ALSO = {  # a name whose loss at the end of a range is another's
    "loss.ppo": settings_of("ppo", RECOMPUTE, **CLIPS),
    "loss.opd_pg": settings_of("opd_mixed", {"reward_coef": 0.0}, cap="ratio_max"),
    "loss.tis_pg": settings_of("opd_mixed", {"teacher_coef": 0.0}, rho="ratio_max"),
}
SHARES = {"clip_frac": "policy/clip_frac", "dual_clip_frac": "policy/dual_clip_frac"}
OF_SEQUENCES = ("loss.gspo",)  # whose clip_frac is another mean


def built(name, given):
    settings = AlgorithmSettings(name=name)
    for key, value in given.items():
        settings = options.with_value(settings, key, value)
    return make(name, **{k: v for k, v in vars(settings).items() if k not in ("name", "entropy_coef")},
                entropy_coef=0.0)  # fmt: skip


def inputs_of(case):
    a = {k: np.asarray(v, np.float64) for k, v in case["inputs"].items() if k != "groups"}
    mask = a["mask"] != 0
    off = np.where(mask, 0.37 * np.cos(np.arange(mask.size)).reshape(mask.shape), 0.0)
    logp = a["logp"] if "logp" in a else a["old_logp"]
    old = a.get("old_logp", a.get("prox_logp", logp + off))
    advantages = a.get("advantages", np.zeros(mask.shape))
    if advantages.ndim == 1:
        advantages = np.repeat(advantages[:, None], mask.shape[1], axis=1)
    x = LossInputs(
        logprobs=jnp.asarray(logp),
        entropy=jnp.zeros(mask.shape),
        behaviour_logprobs=jnp.asarray(a.get("rollout_logp", a.get("behav_logp", old - off))),
        advantages=jnp.asarray(advantages),
        mask=jnp.asarray(mask),
        segment_ids=jnp.ones(mask.shape, int),
        turn_ids=jnp.asarray(runs(mask)),
        old_logprobs=jnp.asarray(old),
        reference_logprobs=jnp.asarray(a.get("ref_logp", off)),
        teacher_logprobs=jnp.asarray(a.get("teacher_logp", off)),
        lag=jnp.zeros(mask.shape, int),
        selected=jnp.asarray(
            most_covarying(advantages, logp, mask, case["params"].get("ratio", 2e-4)), float
        ),
    )
    return x, mask


def step(algorithm, x, loss_weights):
    """((loss, (of each token, sums)), gradient) as the learner takes them."""

    def total(logprobs):
        loss, sums = algorithm.token_loss(replace(x, logprobs=logprobs))
        return jnp.where(x.mask, loss_weights * loss, 0.0).sum(), (loss, sums)

    fast = {"xla_backend_optimization_level": 0}
    run = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=fast)
    return run(x.logprobs)


def close(got, want):
    assert farthest(np.asarray(got), np.asarray(want).tolist()) < 1e-9


def test_through_a_named_class(named_case):
    case, op = named_case, named_case["op"]
    for of in filter(None, (NAMED[op], ALSO.get(op))):
        check_through(*of(case["params"]), case, op)


def check_through(name, given, case, op):
    with jax.enable_x64(True):
        algorithm = built(name, given)
        x, mask = inputs_of(case)
        aggregation = case["params"].get("agg", LOSSES[op].aggregation)
        norm = case["params"].get("norm_len", 0)
        loss_weights = token_weights(mask, aggregation, norm_length=norm)
        (loss, (each, sums)), grad = step(algorithm, x, loss_weights)
    expected = case["expected"]
    close(loss, expected["loss"])
    close(grad, expected["grad_logp"])
    if "per_token_loss" in expected:
        close(np.where(mask, each, 0.0), expected["per_token_loss"])
    for name, figure in SHARES.items():
        if name in expected and op not in OF_SEQUENCES:
            total, count = sums[figure]
            assert float(total) / max(float(count), 1) == pytest.approx(expected[name], abs=1e-7)


def weighted(case, given):
    """(loss of each token, sums) where a token's loss is -1 before it is corrected."""
    with jax.enable_x64(True):
        x, mask = inputs_of(case)
        x = replace(x, advantages=jnp.ones(mask.shape))
        (_, (loss, sums)), _ = step(built("grpo", {**RECOMPUTE, **given}), x, jnp.ones(mask.shape))
    return np.where(mask, loss, 0.0), {k: float(a / max(b, 1)) for k, (a, b) in sums.items()}


@pytest.mark.slow
def test_weights_through_a_named_class(weights_case):
    loss, _ = weighted(weights_case, weights(weights_case["params"]))
    close(-loss, weights_case["expected"]["weights"])


def test_rejection_through_a_named_class(reject_case):
    p = reject_case["params"]
    given = {"correction.reject_stat": p["stat"], "correction.reject_level": p["level"]}
    given |= renamed(p, low="correction.reject_low", high="correction.reject_high")
    loss, sums = weighted(reject_case, given)
    close(-loss, reject_case["expected"]["mask"])
    for figure, name in (("", "token"), ("_sequences", "seq")):
        want = reject_case["expected"][f"{name}_reject_frac"]
        assert sums[f"is/rejected{figure}"] == pytest.approx(want, abs=1e-7)


def test_veto_through_a_named_class(veto_case):
    loss, _ = weighted(veto_case, {"correction.veto": veto_case["params"]["threshold"]})
    close(-loss, veto_case["expected"]["mask"])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("old_policy", ["behaviour", "recompute", "one_update", "loglinear"])
def test_opsm_through_a_named_class(opsm_case, old_policy, sign):
    """Under every old policy it is the policy that trains which drifted, however old the tokens are."""
    delta, drift = opsm_case["params"]["delta"], np.array(opsm_case["expected"]["seq_kl"])
    with jax.enable_x64(True):
        x, mask = inputs_of(opsm_case)
        x = replace(
            x,
            lag=jnp.where(mask, 1, 0),
            old_logprobs=x.logprobs + 0.3,
            advantages=sign * x.advantages,
        )
        run = partial(step, x=x, loss_weights=jnp.ones(mask.shape))
        plain, masked = (
            run(built("grpo", {"old_policy": old_policy, **given}))[0][1][0]
            for given in ({}, {"correction.opsm_delta": delta})
        )
    negative = np.asarray(x.advantages)[:, 0] < 0
    kept = ~(negative & (drift > delta))
    if sign == 1:
        np.testing.assert_array_equal(kept, opsm_case["expected"]["keep"])
    assert kept.all() == (sign == 1)
    close(masked, np.where(kept[:, None], plain, 0.0))


@pytest.mark.parametrize("correction", ["reject_stat", "veto", "level"])
def test_what_drops_out_is_decided_by_the_policy_that_trains_and_weights_by_the_guess(correction):
    """old_policy=loglinear of tokens one and two versions old: behaviour, and half way to the policy."""
    mask = np.ones((1, 4), bool)
    d, lag = np.array([[0.5, -0.5, 0.5, -0.5]]), np.array([[1, 1, 2, 2]])
    given = {
        "reject_stat": {"reject_stat": "ratio", "reject_low": 0.7, "reject_high": 9.0},
        "veto": {"veto": 0.7},
        "level": {"level": "token", "high": 9.0},
    }[correction]
    with jax.enable_x64(True):
        x = LossInputs(
            logprobs=jnp.asarray(d - 2), entropy=jnp.zeros(d.shape), mask=jnp.asarray(mask),
            behaviour_logprobs=jnp.full(d.shape, -2.0), advantages=jnp.ones(d.shape),
            segment_ids=jnp.ones(d.shape, int), turn_ids=jnp.zeros(d.shape, int), lag=jnp.asarray(lag),
        )  # fmt: skip
        wide = {"old_policy": "loglinear", "clip_low": 0.9, "clip_high": 9.0}
        given = {f"correction.{k}": v for k, v in given.items()}
        plain, corrected = (
            step(built("grpo", {**wide, **more}), x, jnp.ones(d.shape))[0][1][0]
            for more in ({}, given)
        )
    want = {
        "reject_stat": np.exp(d) >= 0.7,
        "veto": np.zeros(4),  # one token takes its sequence with it
        "level": np.exp(np.array([[0, 0, 0.25, -0.25]])),
    }[correction]
    close(np.asarray(corrected) / np.asarray(plain), np.broadcast_to(want, d.shape))


def test_kl_in_the_reward_through_a_named_class(reward_case):
    """reinforce_pp whitens the returns of the case's token rewards."""
    inputs, p = reward_case["inputs"], reward_case["params"]
    mask = np.array(inputs["mask"]) != 0
    members, width = [], mask.shape[1]
    for i, (own, logprobs, reward) in enumerate(zip(mask, inputs["old_logp"], inputs["rewards"])):
        arrays = {"loss_mask": own, "logprobs": np.array(logprobs)}
        members.append(replace(fake_trajectory(0, i, width, reward), **arrays))
    group = replace(fake_group(0, [0.0], [8]), trajectories=tuple(members))
    extras = {"reference_logprobs": [np.array(row) for row in inputs["ref_logp"]]}
    kl = KlSettings(coef=p["beta"], where="reward", kind=p["kind"])
    values, _ = make("reinforce_pp", kl=kl).advantages([group], extras, None)
    rewards = np.array(reward_case["expected"]["token_rewards"])
    want = whiten(discounted_returns(rewards, mask), mask)
    np.testing.assert_allclose(values, want, atol=1e-6)


def test_every_loss_that_a_name_has_is_here():
    """Each class with a loss of its own; the others' is grpo's."""
    own = {name for name in ALGORITHMS if "loss" in vars(type(make(name)))}
    own -= {"distill"}  # of distributions: tests/learner/test_divergence.py
    assert own <= {of({"tis": {}})[0] for of in (*NAMED.values(), *ALSO.values())}


def pytest_generate_tests(metafunc):
    from tests.algorithms.conftest import load_cases

    cases = load_cases(metafunc.config)
    normalised = [c["name"] for c in cases if c["params"].get("batch_normalize")]
    fixtures = {
        "named_case": [c for c in cases if c["op"] in NAMED],
        "weights_case": [
            c for c in cases if c["op"] == "mismatch.weights" and c["name"] not in normalised
        ],
        "reject_case": [c for c in cases if c["op"] == "mismatch.reject"],
        "veto_case": [c for c in cases if c["op"] == "mismatch.veto"],
        "reward_case": [c for c in cases if c["op"] == "reward.kl"],
        "opsm_case": [c for c in cases if c["op"] == "mask.opsm"],
    }
    for name, chosen in fixtures.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, chosen, ids=[case["name"] for case in chosen])
