"""Every operation against worked cases: float64 values of the formulas, gradients by finite differences.

`python -m pytest tests/algorithms/test_cases.py --cases FILE` runs any file of this format; the failures name each
operation that is missing or off. Each case runs in float64 (1e-9) and float32 (5e-5) under jit, gradients by jax.grad.
What must not matter is tried as well: NaN and inf at mask 0, padding, the order of rows, jit, packing, devices.
"""

import jax
import numpy as np
import pytest

from rl_jax.algorithms.token_advantages import whiten_parts
from tests.algorithms.case_losses import LOSSES
from tests.algorithms.case_runs import JUNK, OPS, compare, run_case
from tests.algorithms.conftest import load_cases

FEW = ("agg", "loss.ppo", "loss.gspo", "loss.kl_cov")  # by token, by sequence, by batch


# What is not tried of an operation, and why; beside these only what has no mask is neither poisoned nor padded.
NOT_POISONED = {
    "loss.entropy": "logits of all places are given; the learner gathers trained ones before",
    "loss.distill_full": "as loss.entropy",
}
NOT_PADDED = {
    "adv.whiten_dp": "rows are dealt to shards by place, and one output is of a shard alone",
    "agg.microbatch": "parts are cut by place, and each part is an output",
}
NOT_PERMUTED = {
    "adv.graph_credit": "paths name nodes by place",
    "adv.role_ema": "a running mean, in the order of time",
    "adv.whiten_dp": "rows are dealt to shards by place, and one output is of a shard alone",
    "agg.microbatch": "parts are cut by place, and each part is an output",
    "curriculum.dump": "windows, in the order of time",
    "curriculum.spo": "a tracker, in the order of time",
    "loss.entropy_adaptive": "steps, in the order of time",
    "num.top_p": "one distribution, not rows",
    "reward.kl_controller": "steps, in the order of time",
    "stale.alpha_filter": "takes the first of a queue",
    "stale.eta_capacity": "states, in the order of time",
    "stale.eta_check": "pairs of numbers, one after the other",
}


def has_mask(case):
    return OPS.get(case["op"]) is not None and "mask" in case["inputs"]


def pads(case):
    op = OPS[case["op"]]
    return bool(op.own_mask) or op.rows == "mask" and has_mask(case)


def takes_junk(case):
    op = OPS[case["op"]]
    return op.selects and (has_mask(case) or bool(op.own_mask))


def check(case, dtype="float64", **run):
    if case["op"] not in OPS:
        pytest.fail(f"operation {case['op']} is missing from the table")
    wrong = compare(run_case(case, dtype, **run), case, dtype)
    assert not wrong, "; ".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_case(case, dtype):
    check(case, dtype)


def test_junk_off_the_mask_changes_nothing(masked_case):
    for junk in JUNK:
        check(masked_case, variant=junk)


def test_order_of_rows_changes_nothing(rows_case):
    check(rows_case, variant="permuted")


@pytest.mark.slow
def test_padding_changes_nothing(padded_case):
    check(padded_case, variant="padded")


@pytest.mark.slow
def test_jit_changes_nothing(each_case):
    with jax.disable_jit():
        check(each_case)


@pytest.mark.parametrize("per_row", [2, 3])
def test_packing_changes_nothing(packed_case, per_row):
    """Several sequences a row, trained tokens only: the learner's layout."""
    check(packed_case, per_row=per_row)


def test_two_devices_change_nothing(few_case):
    check(few_case, num_devices=2)


def test_four_devices_change_nothing(loss_case):
    check(loss_case, num_devices=4)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_change_nothing_of_any_case(packed_case, num_devices):
    check(packed_case, num_devices=num_devices)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_whitening_of_parts_is_whitening_of_the_whole(whiten_case, num_parts):
    x, mask = (np.asarray(whiten_case["inputs"][n], float) for n in ("x", "mask"))
    parts = list(zip(np.array_split(x, num_parts), np.array_split(mask, num_parts)))
    shift = whiten_case["params"].get("shift", True)
    whole = np.concatenate(whiten_parts(parts, shift=shift))
    assert not compare({"whitened": whole}, whiten_case, "float64")


def test_what_is_not_tried_has_a_reason(request):
    cases = [c for c in load_cases(request.config) if c["op"] in OPS]
    lists = fixtures(cases)
    ops = {
        name: {c["op"] for c in lists[name]} for name in ("masked_case", "rows_case", "padded_case")
    }
    every = {c["op"] for c in cases}
    masked = {c["op"] for c in cases if has_mask(c) or OPS[c["op"]].own_mask}
    assert every - ops["rows_case"] == NOT_PERMUTED.keys() & every
    assert masked - ops["masked_case"] == NOT_POISONED.keys() & every
    assert masked - ops["padded_case"] == NOT_PADDED.keys() & every


def test_a_case_without_params_is_one_line(few_case):
    with pytest.raises(ValueError, match=f"case {few_case['name']} has no params; give"):
        run_case({k: v for k, v in few_case.items() if k != "params"})


def test_a_param_that_nothing_reads_is_one_line():
    cases = {
        "loss.ppo": {"logp": [[0.0]], "old_logp": [[0.0]], "advantages": [[1.0]]},
        "adv.rloo": {"rewards": [1.0], "groups": [0]},
    }
    for op, inputs in cases.items():
        case = {
            "name": "x",
            "op": op,
            "inputs": {**inputs, "mask": [[1]]},
            "params": {"clip_hi": 0.3},
        }
        with pytest.raises(ValueError, match=f"{op} reads no param clip_hi"):
            run_case(case)


def first_of_each(cases):
    """One case an operation: the one with most trained tokens, an empty row preferred."""
    best = {}
    for case in cases:
        mask = np.asarray(case["inputs"].get("mask", [[1]]))
        score = (not mask.any(axis=-1).all(), mask.sum())
        if case["op"] not in best or score > best[case["op"]][0]:
            best[case["op"]] = (score, case)
    return [case for _, case in best.values()]


def fixtures(cases):
    """Fixture name -> the cases it stands for."""
    known = [case for case in cases if case["op"] in OPS]
    chosen = first_of_each(known)
    rows = {op: OPS[op].rows for op in OPS}
    return {
        "case": cases,
        "masked_case": [c for c in known if takes_junk(c)],
        "rows_case": [c for c in known if rows[c["op"]] != "fixed"],
        "padded_case": [c for c in known if pads(c)],
        "each_case": chosen,
        "few_case": [c for c in chosen if c["op"] in FEW],
        "packed_case": [c for c in known if c["op"] in LOSSES],
        "loss_case": [c for c in chosen if c["op"] in LOSSES],
        "whiten_case": [c for c in known if c["op"] == "adv.whiten"],
    }  # fmt: skip


def pytest_generate_tests(metafunc):
    for name, cases in fixtures(load_cases(metafunc.config)).items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases, ids=[case["name"] for case in cases])
