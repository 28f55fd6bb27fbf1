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

FEW = ("agg", "loss.ppo", "loss.gspo", "loss.kl_cov")  # by token, by sequence, by batch


def has_mask(case):
    return OPS.get(case["op"]) is not None and "mask" in case["inputs"]


def takes_junk(case):
    op = OPS[case["op"]]
    return op.selects and (has_mask(case) or bool(op.own_mask))


def check(case, dtype="float64", **run):
    if case["op"] not in OPS:
        pytest.fail(f"operation {case['op']} is missing from the table")
    wrong = compare(run_case(case, dtype, **run), case, dtype)
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_case(case, dtype):
    check(case, dtype)


def test_junk_off_the_mask_changes_nothing(masked_case):
    for junk in JUNK:
        check(masked_case, variant=junk)


def test_order_of_rows_changes_nothing(rows_case):
    check(rows_case, variant="permuted")


def test_padding_changes_nothing(padded_case):
    check(padded_case, variant="padded")


def test_jit_changes_nothing(few_case):
    with jax.disable_jit():
        check(few_case)


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
        "padded_case": [c for c in known if rows[c["op"]] == "mask" and has_mask(c)],
        "few_case": [c for c in chosen if c["op"] in FEW],
        "packed_case": [c for c in known if c["op"] in LOSSES],
        "loss_case": [c for c in chosen if c["op"] in LOSSES],
        "whiten_case": [c for c in known if c["op"] == "adv.whiten"],
    }  # fmt: skip


def pytest_generate_tests(metafunc):
    from tests.algorithms.conftest import load_cases

    for name, cases in fixtures(load_cases(metafunc.config)).items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases, ids=[case["name"] for case in cases])
