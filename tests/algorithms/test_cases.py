"""Every function of this version against worked cases: float64 values from the formulas.

Gradients of the cases are finite differences. Each case also runs with NaN, +inf and -inf wherever
the mask is 0, with three more padded columns and two empty rows, and with its rows reversed; all
under jit. Tolerance |a - b| <= 5e-5 max(1, |b|), for float32.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms.advantages import group_normalised, leave_one_out
from rl_jax.algorithms.aggregate import token_weights
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.ppo import ppo_clip
from rl_jax.algorithms.sft import Sft
from rl_jax.learner.logprobs import token_logprobs
from rl_jax.learner.mismatch import mismatch_metrics, mismatch_totals
from rl_jax.settings import AlgorithmSettings

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())
TOLERANCE = 5e-5
VARIANTS = ("plain", "nan", "inf", "-inf", "padded", "reversed")


def cases(*ops):
    found = [case for case in CASES if case["op"] in ops]
    assert found, f"no case of {ops}"
    return pytest.mark.parametrize("case", found, ids=[case["name"] for case in found])


def check(got, want, name):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, name
    worst = np.max(np.abs(got - want) / np.maximum(1.0, np.abs(want)), initial=0.0)
    assert worst <= TOLERANCE, f"{name} is off by {worst}"


def rearranged(arrays, mask, variant):
    """The arrays [B, T, ...] and their mask in one of the VARIANTS."""
    arrays = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    mask = np.asarray(mask, np.float64) != 0
    if variant in ("nan", "inf", "-inf"):
        bad = ~mask
        for name, a in arrays.items():
            spread = bad.reshape(bad.shape + (1,) * (a.ndim - 2))
            arrays[name] = np.where(spread, float(variant), a)
    elif variant == "padded":
        pads = {n: [(0, 2), (0, 3)] + [(0, 0)] * (a.ndim - 2) for n, a in arrays.items()}
        arrays = {n: np.pad(a, pads[n], constant_values=7.0) for n, a in arrays.items()}
        mask = np.pad(mask, [(0, 2), (0, 3)])
    elif variant == "reversed":
        arrays, mask = {n: a[::-1] for n, a in arrays.items()}, mask[::-1]
    return arrays, mask


def restored(array, shape, variant):
    """Back to the case's own rows and columns."""
    array = np.asarray(array)
    if variant == "padded":
        return array[: shape[0], : shape[1]]
    return array[::-1] if variant == "reversed" else array


def weights_of(case, mask):
    """f32[B, T] of the case's aggregation."""
    params = case["params"]
    return np.float32(
        token_weights(mask, params.get("agg", "token-mean"), norm_length=params.get("norm_len", 0))
    )


# Jitted once, with everything as arguments: cases of one shape share a program.
@jax.jit
def run_ppo(logp, old_logp, advantages, mask, weights, low, high, dual):
    def weighted(logp):
        loss, clipped, dualled = ppo_clip(
            logp, old_logp, advantages, mask, clip_low=low, clip_high=high, dual_clip=dual
        )
        return jnp.where(mask, weights * loss, 0.0).sum(), (loss, clipped, dualled)

    return jax.value_and_grad(weighted, has_aux=True)(logp)


@jax.jit
def run_entropy(logits, temperature, mask, weights):
    def weighted(logits):
        _, entropy = token_logprobs(logits, jnp.zeros(mask.shape, int), temperature)
        entropy = jnp.where(mask, entropy, 0.0)
        return (weights * entropy).sum(), entropy

    return jax.value_and_grad(weighted, has_aux=True)(logits)


run_mismatch = jax.jit(mismatch_totals)


@cases("adv.grpo", "adv.rloo")
def test_advantages(case):
    inputs, params = case["inputs"], dict(case["params"])
    estimate = group_normalised if case["op"] == "adv.grpo" else leave_one_out
    got = estimate(inputs["rewards"], inputs["groups"], inputs.get("valid"), **params)
    mask = np.asarray(inputs["mask"])
    for name, value in (("seq", got), ("token", got[:, None] * mask)):
        want = np.asarray(case["expected"][f"{name}_advantages"])
        assert np.max(np.abs(value - want)) <= 1e-9, name


@cases("agg")
def test_aggregation(case):
    inputs, params = case["inputs"], case["params"]
    x = np.asarray(inputs["x"])
    weights = token_weights(
        inputs["mask"], params["agg"], inputs.get("groups"), params.get("norm_len", 0)
    )
    assert abs((weights * x).sum() - case["expected"]["loss"]) <= 1e-9
    assert np.max(np.abs(weights - case["expected"]["grad_x"])) <= 1e-9


@cases("agg.microbatch")
def test_parts_of_a_split_batch_add_up_to_the_whole(case):
    inputs, params = case["inputs"], case["params"]
    weighted = np.asarray(inputs["x"]) * token_weights(
        inputs["mask"], params["agg"], norm_length=params.get("norm_len", 0)
    )
    parts = [weighted[rows].sum() for rows in params["splits"]]
    assert np.max(np.abs(np.array(parts) - case["expected"]["parts"])) <= 1e-9
    assert abs(sum(parts) - case["expected"]["loss"]) <= 1e-9


@pytest.mark.parametrize("variant", VARIANTS)
@cases("loss.ppo")
def test_ppo_clip(case, variant):
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    shape = np.shape(inputs["mask"])
    advantages = np.asarray(inputs["advantages"])
    if advantages.ndim == 1:
        advantages = np.broadcast_to(advantages[:, None], shape)
    arrays = {n: inputs[n] for n in ("logp", "old_logp")} | {"advantages": advantages}
    arrays, mask = rearranged(arrays, inputs["mask"], variant)

    (loss, (per_token, clipped, dual)), grad = run_ppo(
        *(np.float32(arrays[n]) for n in ("logp", "old_logp", "advantages")),
        mask,
        weights_of(case, mask),
        params.get("clip_low", 0.2),
        params.get("clip_high", 0.2),
        params.get("clip_c"),
    )
    check(loss, expected["loss"], "loss")
    check(restored(per_token, shape, variant), expected["per_token_loss"], "per_token_loss")
    check(restored(grad, shape, variant), expected["grad_logp"], "grad_logp")
    num_tokens = max(mask.sum(), 1)
    check(clipped.sum() / num_tokens, expected["clip_frac"], "clip_frac")
    check(dual.sum() / num_tokens, expected["dual_clip_frac"], "dual_clip_frac")


@pytest.mark.parametrize("variant", VARIANTS)
@cases("loss.sft")
def test_sft(case, variant):
    shape = np.shape(case["inputs"]["mask"])
    arrays, mask = rearranged({"logp": case["inputs"]["logp"]}, case["inputs"]["mask"], variant)

    zeros = np.zeros(mask.shape, np.float32)
    x = LossInputs(zeros, zeros, zeros, zeros, mask, zeros, zeros)
    weights = weights_of(case, mask)

    def weighted(logp):
        loss, _ = Sft(AlgorithmSettings()).token_loss(replace(x, logprobs=logp))
        return (weights * loss).sum()

    loss, grad = jax.value_and_grad(weighted)(jnp.float32(arrays["logp"]))
    check(loss, case["expected"]["loss"], "loss")
    check(restored(grad, shape, variant), case["expected"]["grad_logp"], "grad_logp")


@pytest.mark.parametrize("variant", ("plain", "padded", "reversed"))
@cases("loss.entropy")
def test_entropy(case, variant):
    params, shape = case["params"], np.shape(case["inputs"]["mask"])
    arrays, mask = rearranged({"z": case["inputs"]["logits"]}, case["inputs"]["mask"], variant)

    weights = -params["coef"] * weights_of(case, mask)
    (loss, entropy), grad = run_entropy(
        np.float32(arrays["z"]), params["temperature"], mask, np.float32(weights)
    )
    check(loss, case["expected"]["loss"], "loss")
    check(restored(entropy, shape, variant), case["expected"]["entropy"], "entropy")
    check(restored(grad, shape, variant), case["expected"]["grad_logits"], "grad_logits")


@cases("num.logprob")
def test_logprob(case):
    logits = jnp.float32(case["inputs"]["logits"])
    targets = jnp.asarray(case["inputs"]["targets"])
    keep = None
    if "keep_ids" in case["inputs"]:
        keep = np.zeros(logits.shape, bool)
        for row, ids in enumerate(case["inputs"]["keep_ids"]):
            keep[row, [*ids, case["inputs"]["targets"][row]]] = True

    @jax.jit
    def run(logits):
        temperature = case["params"].get("temperature", 1.0)
        logprobs, entropy = token_logprobs(logits, targets, temperature, keep)
        return logprobs.sum(), (logprobs, entropy)

    (_, (logprobs, entropy)), grad = jax.value_and_grad(run, has_aux=True)(logits)
    check(logprobs, case["expected"]["logp"], "logp")
    check(grad, case["expected"]["grad_logits"], "grad_logits")
    assert np.isfinite(entropy).all()


@pytest.mark.parametrize("variant", VARIANTS)
@cases("mismatch.metrics")
def test_mismatch(case, variant):
    """The token-level outputs of the case; per-sequence ones are not in this version."""
    arrays, mask = rearranged(
        {n: case["inputs"][n] for n in ("train_logp", "rollout_logp")},
        case["inputs"]["mask"],
        variant,
    )
    zeros = np.zeros(mask.shape, np.int32)
    totals = run_mismatch(
        np.float32(arrays["train_logp"]),
        np.float32(arrays["rollout_logp"]),
        mask,
        zeros,
        zeros != 0,
    )
    metrics = mismatch_metrics(jax.device_get(totals))
    names = {
        "k1": "mismatch/k1",
        "k3": "mismatch/k3",
        "abs_logp_diff": "mismatch/abs_mean_lag0_pure",
        "max_abs_logp_diff": "mismatch/abs_max",
        "ess_token": "is/ess",
    }
    for key, name in names.items():
        check(metrics[name].mean, case["expected"][key], key)
