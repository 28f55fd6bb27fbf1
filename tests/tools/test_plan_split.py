"""The planner as a command: from a run's traces, or a workload, and a table of costs to a ratio."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.config import parse, resolved_json
from rl_jax.resume import encode
from rl_jax.rollout.traces import write_traces
from rl_jax.serve.split import Traffic
from rl_jax.simulate.pd_ratio import TRACES, planned
from rl_jax.testing.trajectories import fake_trajectory
from rl_jax.tools import plan_split
from rl_jax.tools.plan_split import Unit, traffic_of
from rl_jax.types import FinishReason, Turn, VersionSpan

# A prompt token takes 1 ms. A step takes 10 ms for up to 10 requests, then 1 ms each.
COSTS = {
    "prefill": [[100, 0.1], [1000, 1.0]],
    "decode": [[1, 0.01], [10, 0.01], [100, 0.1]],
    "slots": 20,
}


def trajectory(group, prompt, answers, observation=4):
    """One that samples `answers` tokens in each turn, after `prompt` and then `observation` ones."""
    base, turns, mask = fake_trajectory(group), [], []
    for i, num in enumerate(answers):
        added = observation if i else prompt
        turns.append(
            Turn(
                np.ones(added, np.int32),
                np.ones(num, np.int32),
                np.zeros(num, np.float32),
                None,
                (VersionSpan(0, num, 0),),
                np.zeros(num, bool),
                FinishReason.STOP,
                0,
                "s",
                "p",
                {},
            )  # fmt: skip
        )
        mask += [False] * added + [True] * num
    mask, num = np.array(mask), len(mask)
    return replace(
        base, tokens=np.ones(num, np.int32), loss_mask=mask, logprobs=np.zeros(num, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), context_mixed=np.zeros(num, bool),
        turn_ids=np.zeros(num, np.int16), turn_rewards=np.full(len(turns), np.nan, np.float32),
        state_keys=("",) * len(turns), turns=tuple(turns),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run directory whose two steps were played with such prompts and answers, and the file of costs."""

    def make(prompt, answers):
        settings = parse([]).settings
        rollout = replace(settings.rollout, batch_groups=5, group_size=8, max_staleness=1)
        settings = replace(settings, run_id="r", rollout=rollout)
        (tmp_path / "config.json").write_text(resolved_json(settings))
        for step in (1, 2):
            played = [trajectory(step, prompt, answers)]
            write_traces(tmp_path / f"rollouts/step_{step}/train", played, lambda tokens: "")
        (tmp_path / "costs.json").write_text(json.dumps(COSTS))
        return tmp_path

    return make


def plan(capsys, *argv):
    code = plan_split.main([*map(str, argv)])
    said = capsys.readouterr()
    return code, (said.out if code == 0 else said.err).splitlines()


@pytest.mark.parametrize(
    ("prompt", "answers", "best", "others"),
    [
        (1000, (10,), (3, 1), ["1.00  prefill", "2.00  prefill", "3.00  prefill"]),
        (100, (500, 500), (1, 3), []),
    ],
)
def test_a_runs_traces_give_the_ratio_and_the_table_of_all(
    capsys, run, prompt, answers, best, others
):
    folder = run(prompt, answers)
    code, lines = plan(capsys, "--trace", folder, "--costs", folder / "costs.json", "--servers", 4)
    assert code == 0
    assert lines[-1] == f"best: {best[0]} prefill, {best[1]} decode"
    assert (
        lines[0]
        == f"a turn that is prefilled: {prompt} tokens, then {sum(answers)} sampled; 80 at once"
    )
    rows = [line.split() for line in lines[2:5]]
    assert [row[:2] for row in rows] == [["1", "3"], ["2", "2"], ["3", "1"]]
    assert [row[-1] == "best" for row in rows].index(True) == best[0] - 1
    if others:  # 1 s a prompt: a turn a second and server
        assert [(float(row[2]), row[4]) for row in rows] == [
            (1, "prefill"),
            (2, "prefill"),
            (3, "prefill"),
        ]
        assert [float(row[3]) for row in rows] == [0.33, 0.67, 1.0]


def test_what_decode_servers_append_is_no_turn_of_a_prefill_server():
    turns = [Unit(1000, 10, 1000, True), Unit(100, 20, 1110, False), Unit(300, 30, 1430, False)]
    traffic, history = traffic_of(turns, 256, 7)
    assert traffic == Traffic((1000 + 300) / 2, (10 + 20 + 30) / 2, 7)
    assert history == pytest.approx((10 * 1005 + 20 * 1120 + 30 * 1445) / 60)
    assert traffic_of(turns, 99, 7)[0].prompt == pytest.approx(1400 / 3)
    with pytest.raises(ValueError, match="no turn"):
        traffic_of([], 256, 7)


@pytest.mark.parametrize("shape", TRACES)
def test_a_workload_gets_the_ratio_that_the_simulated_runs_are_compared_with(capsys, shape):
    # tests/simulate/test_pd_ratio.py plays these.
    argv = ("--workload", shape.tag, "--costs", "H800", "--servers", 4, "--at_once", 128)
    code, lines = plan(capsys, *argv)
    choice = planned(shape)
    assert (
        code == 0 and lines[-1] == f"best: {choice.num_prefill} prefill, {choice.num_decode} decode"
    )


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--workload=x"], "--workload=x is none of prefill_heavy, ", 2),
        (["--workload=game"], "--at_once=0: a workload does not say", 2),
        (["--workload=game", "--at_once=9", "--servers=1"], "num_servers=1: one prefills", 2),
        (["--workload=game", "--at_once=9", "--costs=H9"], "--costs=H9 is no file, and none of", 2),
        (["--workload=game", "--at_once=9", "--costs={}/bad.json"], "bad.json is no cost table .*KeyError", 2),
        (["--trace={}"], "holds no complete traces", 3),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line(capsys, tmp_path, words, said, code):
    (tmp_path / "bad.json").write_text(encode({"prefill": [[1, 1.0]]}))
    argv = ["--costs=H800", "--servers=4", *(word.format(tmp_path) for word in words)]
    found, lines = plan(capsys, *argv)
    assert found == code and len(lines) == 1
    assert re.search(said, lines[0])
