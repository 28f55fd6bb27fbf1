"""Metrics as (sum, count, min, max), the one table of their names, and the metrics file.

Owns: `Metric`, `METRICS`, `MetricsWriter` (sole writer of metrics.jsonl).
Invariants: a mean is divided once, here, at the very end; what was not measured is absent, never 0; a value that is not
finite is dropped and counted, so that every line of metrics.jsonl is valid JSON; nothing here can stop training: a full
disk costs rows, which are counted.
Life of a number: 1 a part returns a Metric (or (sum, count) from inside jit). 2 Whoever holds several merges them.
3 The driver's recorder hands one row a step to MetricsWriter and to Progress (progress.py).
Must not: know a part, or wait for one.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_jax.disk import open_lines

LOG = logging.getLogger(__name__)

# name -> one-line meaning. A name may end in ".x": one task tag, evaluation or reason. lag{n}: n = consuming version
# minus the version that sampled the token, 9 stands for 9 and more; pure or mixed: whether all KV behind the token was
# of that version. at{n}: n members of a group; 2, 4, 8, ... and the size of the groups.
METRICS = {
    "reward/mean": "reward of the trained trajectories",
    "reward/std": "standard deviation of the reward over trajectories",
    "reward/min": "lowest reward of a trained trajectory",
    "reward/max": "highest reward of a trained trajectory",
    "reward/p10": "10th percentile of the rewards of trained trajectories",
    "reward/p90": "90th percentile of them",
    "reward/part": "of each of a reward's parts, .NAME, over the trained trajectories that have it",
    "reward/success": "share of trained trajectories whose reward is 1",
    "filter/kept": "share of the groups completed since the batch before that the algorithm selected",
    "filter/batches": "groups completed for the batch, in batches: rounds of dynamic sampling",
    "reward/mean_all": "reward of all trajectories completed since the batch before, what was not selected included",
    "reward/success_all": "of them, the share whose reward is 1",
    "reward/pass_at{n}": "estimate of the share of tasks that n episodes solve at least once, over the trained groups",
    "reward/pass_at{n}_all": "the same over all groups completed since the batch before",
    "reward/model": "the reward model's score of a trained trajectory, before algorithm.reward_model_coef",
    "reward/solved_all_groups": "share of groups whose every trajectory succeeded",
    "reward/solved_no_groups": "share of groups of which none did",
    "reward/zero_std_groups": "share of groups whose rewards are all equal (no gradient from them)",
    "curriculum/prob": "share of the next tasks that tasks.curriculum draws of a tag",
    "eval/success": "share of evaluation episodes whose reward is 1",
    "eval/episodes": "evaluation episodes that were scored",
    "policy/entropy": "entropy of the policy in nats a trained token",
    "policy/entropy_coef": "coefficient of the entropy bonus, where it follows algorithm.entropy.target",
    "policy/loss": "the loss that was minimised, over the global count",
    "policy/clip_frac": "share of trained tokens whose ratio was clipped",
    "policy/clip_frac_low": "of these, at the lower bound: advantage not above 0 (cispo: ratio below ratio_min)",
    "policy/clip_frac_high": "at the upper bound: advantage above 0 (cispo: ratio above ratio_max)",
    "policy/dual_clip_frac": "share of trained tokens at the bound of algorithm.dual_clip",
    "policy/ratio": "probability ratio to the behaviour policy, a trained token",
    "policy/teacher_divergence": "of the whole distribution from the teacher's, a trained token (distill)",
    "policy/reverse_kl": "log-prob minus the teacher's, a trained token: KL to the teacher",
    "policy/kl": "k3 estimate of the KL to the reference policy, a trained token",
    "policy/advantage": "advantage a trained token; about 0 by construction",
    "optim/grad_norm": "global gradient norm before clipping",
    "optim/grad_norm_clipped": "the same after it: what the optimizer was given, at most learner.grad_clip",
    "optim/learning_rate": "learning rate of the update",
    "optim/skipped": "updates skipped because loss or gradient was not finite",
    "sft/loss": "cross-entropy in nats a trained token, of a warm start or of rows; .held_out: of those held out",
    "preference/loss": "loss of a pair at step start (dpo, rm)",
    "preference/margin": "reward of a pair's chosen minus its rejected",
    "preference/accuracy": "share of pairs whose chosen has the higher reward",
    "preference/chosen": "reward of the chosen: of rm, or of dpo beta times the sum of its log-ratios",
    "preference/rejected": "the same of the rejected",
    "data/epoch": "passes over the rows that were given, the step's included",
    "mismatch/abs_mean": "mean |trainer log-prob - sampler log-prob| a trained token, all lags",
    "mismatch/abs_max": "largest |trainer log-prob - sampler log-prob| of any trained token",
    "mismatch/abs_p50": "median of the same",
    "mismatch/abs_p99": "99th percentile of the same",
    "mismatch/k1": "mean(log p_sampler - log p_trainer): KL(sampler || trainer), unbiased and noisy",
    "mismatch/k2": "mean((log p_sampler - log p_trainer)^2) / 2: biased, with little noise",
    "mismatch/k3": "mean(rho - log rho - 1), rho = p_trainer / p_sampler: the same KL with less noise",
    "mismatch/chi2": "mean(rho^2) - 1: what the variance of importance-weighted sums grows with",
    "mismatch/chi2_sequence": "the same of the sequences' products of rho",
    "mismatch/abs_prob": "mean |p_trainer - p_sampler| a trained token",
    "mismatch/mult_prob_error": "mean exp|log p_trainer - log p_sampler| a trained token; 1 is none",
    "mismatch/train_ppl": "perplexity of a trained trajectory's sampled tokens under the trainer",
    "mismatch/rollout_ppl": "the same under the policy that sampled",
    "mismatch/ppl_gap": "log of the first minus log of the second",
    "mismatch/ppl_gap_abs": "its absolute value",
    "mismatch/ppl_ratio": "the first over the second",
    "mismatch/abs_mean_lag{n}_pure": "the mean at one lag, KV of the token's own version only",
    "mismatch/abs_mean_lag{n}_mixed": "the mean at one lag, some KV of another version",
    "mismatch/k3_lag{n}_pure": "k3 at one lag, pure",
    "mismatch/k3_lag{n}_mixed": "k3 at one lag, mixed",
    "is/ess": "effective sample size of the importance weights over their number",
    "is/ess_lag{n}": "the same of the tokens that are n versions old",
    "is/ess_sequence": "the same of the sequences' products of weights",
    "is/rejected": "share of trained tokens that algorithm.correction takes out of the loss",
    "is/rejected_sequences": "share of trained trajectories of which it takes a token out",
    "is/weight": "importance weight of algorithm.correction, a trained token",
    "critic/loss": "the critic's squared error, halved and clipped, weighted as the policy's loss",
    "critic/explained_variance": "1 - Var(return - value) / Var(return): 1 perfect, 0 no better than the mean",
    "critic/value": "value at step start",
    "critic/return": "what it is trained towards",
    "critic/clip_frac": "share of tokens whose value moved beyond critic.value_clip",
    "critic/grad_norm": "norm of the critic's gradient, before clipping",
    "critic/grad_norm_clipped": "after it",
    "critic/learning_rate": "rate of the critic's step",
    "critic/skipped": "1 if the critic's update was not finite and was skipped",
    "staleness/mean": "consuming version minus the version of a trained token",
    "staleness/max": "the largest of them",
    "staleness/start": "consuming version minus the version of a trajectory's first trained token",
    "staleness/versions": "policy versions that sampled a trajectory's trained tokens",
    "staleness/share_lag{n}": "share of the trained tokens that are n versions old",
    "staleness/bound": "versions that the step's batch may be old (rollout.max_staleness, staleness_policy)",
    "length/response": "sampled tokens of a trained trajectory",
    "length/response_p90": "90th percentile of them",
    "length/response_ended": "sampled tokens of those that were not cut",
    "length/response_max": "sampled tokens of the longest trained trajectory",
    "length/turns": "turns of a trained trajectory",
    "length/truncated": "share of trained trajectories that were cut, whatever the reason",
    "finish/stop": "share of turns that ended at a stop token",
    "finish/eos": "share of turns that ended at the end-of-turn or end-of-text token",
    "finish/length": "share of turns cut at rollout.max_new_tokens",
    "finish/context": "share of turns cut at engine.context",
    "finish/abort": "share of turns aborted",
    "batch/trajectories": "trajectories of the step",
    "batch/tokens": "tokens of the step, prompts and observations included",
    "batch/trained_tokens": "tokens of the step with a loss",
    "batch/tflops": "10^12 FLOPs of the policy's forward and backward: nothing recomputed, no padding",
    "batch/fill": "share of the packed rows' positions that hold a token",
    "time/step_s": "seconds of a driver step",
    "time/wait_for_batch_s": "seconds the driver waited for groups",
    "time/wait_for_policy_s": "seconds rollout could start nothing because of the staleness bound",
    "time/slots_idle_s": "seconds of the step times the share of episodes' slots that the staleness bound left free",
    "time/wait_for_max_live_s": "seconds in which a task source was at its max_live while slots were free",
    "time/paused_s": "seconds of pauses that steering asked for, between the step before and this one",
    "time/batch_s": "seconds of packing, scoring and advantages",
    "time/train_s": "seconds of the learner's step",
    "time/sync_s": "seconds of the weight sync, all phases",
    "time/eval_s": "seconds of an evaluation",
    "sync/stage_s": "seconds of resharding, copying and verifying weights while generation went on",
    "sync/pause_s": "longest pause of any server at the swap",
    "sync/bytes": "bytes staged on all servers",
    "sync/link_bytes": "bytes of weights through sockets: one copy a server by channel, or one a host with a store",
    "perf/decode_tokens_per_s": "sampled tokens of all servers a second of the step",
    "perf/train_mfu": "batch/tflops over what the train devices' bfloat16 peak does in time/train_s",
    "perf/train_tokens_per_s": "tokens of the batch a second of the learner's step",
    "perf/prefill_tokens_per_s": "tokens whose KV was computed from a prompt, a second of the step",
    "serve/prefill_tokens": "prompt tokens computed by prefill, in the step",
    "serve/found_tokens": "prompt tokens that a prefill server's prefix tree held already, in the step",
    "serve/received_tokens": "tokens whose KV came to decode servers from prefill servers, in the step",
    "serve/cached_tokens": "tokens whose KV a turn found on its decode server, in the step",
    "serve/append_tokens": "observation tokens appended to live histories, in the step",
    "serve/recompute_tokens": "tokens whose KV was rebuilt after a swap, in the step",
    "serve/decode_tokens": "tokens sampled, in the step",
    "serve/running": "requests that a decode server generated for, mean over its blocks in the step",
    "serve/waiting": "requests that waited there for a slot or pages, mean over the same blocks",
    "serve/kv_usage": "share of the KV cache's pages that live histories held, mean over the same blocks",
    "serve/prefill_prompts": "prompts that a prefill server had, mean over its chunks in the step; 1: no line",
    "serve/long_appends": "suffixes over engine.append_limit that a decode server appended itself, in the step",
    "serve/prefilled_suffixes": "suffixes of live histories that prefill servers computed, in the step",
    "serve/stalled_servers": "servers fenced because they made no progress, in the step",
    "serve/suspect_servers": "servers that got nothing new for a while, as they might be dead, in the step",
    "serve/restarts": "processes of servers that were started again after their end, in the step",
    "serve/affinity_moves": "changes of which hardware classes tags prefer (serve.affinity), in the step",
    "serve/role_moves": "servers that went over from prefill to decode or back (serve.pd_balance), in the step",
    "episodes/issued": "attempts issued since the start of the run",
    "episodes/completed": "of these, ended by their environment and scored",
    "episodes/truncated": "of these, cut (.length, .context, .turn_limit, .tool_limit) and scored",
    "episodes/in_flight": "episodes issued and not ended",
    "episodes/buffered": "episodes of complete groups that wait to be consumed",
    "episodes/trained": "episodes trained since the start of the run",
    "episodes/evaluated": "episodes evaluated since the start of the run",
    "episodes/errored": "episodes that ended in a failure of environment, reward or server",
    "episodes/cancelled": "episodes cancelled, with a reason in the ledger",
    "episodes/dropped": "episodes dropped, with a reason in the ledger",
    "episodes/dropped_stale": "of these, older than rollout.max_staleness, by rollout.age_of",
    "episodes/dropped_filtered": "of these, not selected by the algorithm; .REASON by its reason",
    "episodes/dropped_short": "of these, members of a group that could not be completed",
    "episodes/dropped_redundant": "of these, scored members of redundant groups (rollout.extra_groups)",
    "episodes/cancelled_redundant": "of the cancelled, those that were not needed any more (rollout.extra_*)",
    "episodes/retried": "attempts after the first",
    "episodes/rewritten_history": "turns before which the chat template began a new context (rollout.history=template)",
    "episodes/forked_contexts": "turns before which the environment began a new context: its agent rewrote its history",
    "episodes/malformed_calls": "tool calls that could not be read or made; the policy was told why",
    "episodes/cut_observations": "observations longer than rollout.max_obs_bytes, cut and marked",
    "envs/restarts": "workers of environments that ended and were replaced, since the start of the run",
    "envs/max_live_waits": "environments that waited for their source's max_live: others were still being closed",
    "envs/close_failed": "environments whose close() raised, hung or was not reached, since the start of the run",
    "rewards/restarts": "workers of scorers that ended and were replaced, since the start of the run",
    "rewards/retries": "calls of the reward service that were made again, since the start of the run",
    "rewards/rescored_turns": "turns scored again, as their scorer's version changed in the episode, since the start",
    "redundant/episodes": "episodes begun and not needed (rollout.extra_*), since the batch before",
    "redundant/tokens": "tokens that they had sampled: the extra work",
    "redundant/length_kept": "sampled tokens of an episode of the groups completed since the batch before",
    "redundant/length_dropped": "of one that was not needed, up to its end or its cancelling: a lower bound",
    "redundant/turns_kept": "turns of an episode of the groups completed since the batch before",
    "redundant/turns_dropped": "of one that was not needed, likewise: a lower bound",
    "redundant/reward_kept": "reward of an episode of the groups completed since the batch before",
    "redundant/reward_dropped": "of scored members of redundant groups; the others have none",
    "alarm/zero_signal": "1 where no token was trained or every advantage was 0 (rl_jax/guards.py)",
    "alarm/truncated": "1 where most episodes were cut by the context or a length of a turn",
    "alarm/nonfinite": "1 where a figure or the update of the step was not finite",
    "alarm/ess": "1 where is/ess was below guards.ess_below",
    "alarm/k3": "1 where mismatch/k3 was above guards.k3_above",
    "alarm/lag0": "1 where trainer and sampler disagreed under the same weights by more than guards.lag0_above",
    "trackers/lost": "rows and samples that the tracker .NAME did not take, since the process started",
    # A learner's update, servers' chunks, blocks and transfers; an idle device counts as a busy one does.
    "goodput/run": "share of the step in which devices did what it needs, mean over all; .POOL: over a pool's",
    # G_sample; what it lacks to 1 went into stale, failed, filtered and cancelled episodes, or an update that was
    # skipped. A turn under way counts as sampled already, so that it is rather too low than too high.
    "goodput/sample": "trained tokens over sampled tokens that no episode still holds, since the process started",
}

_NUMBER = re.compile(r"(?:(?<=_lag)|(?<=_at))\d+")


def unknown_names(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are not of the METRICS table, tag suffix and lag number aside."""
    return tuple(n for n in names if _NUMBER.sub("{n}", n.split(".")[0]) not in METRICS)


@dataclass(frozen=True)
class Metric:
    """A sum over `count` things, with the extremes where they were recorded."""

    sum: float
    count: float
    min: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Metric":
        values = [float(v) for v in values]
        if not values:
            return cls(0.0, 0)
        return cls(math.fsum(values), len(values), min(values), max(values))

    @property
    def mean(self) -> float | None:
        """None if nothing was counted: missing is not 0."""
        return float(self.sum) / float(self.count) if self.count else None

    def merge(self, other: "Metric") -> "Metric":
        """Of both samples together; an extreme that neither side recorded stays unrecorded."""
        lows = [m.min for m in (self, other) if m.min is not None]
        highs = [m.max for m in (self, other) if m.max is not None]
        return Metric(
            self.sum + other.sum,
            self.count + other.count,
            min(lows, default=None),
            max(highs, default=None),
        )


Row = Mapping[str, Metric | float | int | None]


def merge_rows(rows: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metric by metric, over the rows that have it."""
    merged: dict[str, Metric] = {}
    for row in rows:
        for name, metric in row.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def pass_rates(groups: Iterable[Iterable[float | None]]) -> dict[int, Metric]:
    """k -> pass@k of groups of rewards: the share of tasks that k episodes solve (reward 1) at least once.

    A group of n rewards, c of them solved, estimates it as 1 - C(n - c, k) / C(n, k), without bias; for k = n that is
    whether any is. Groups with fewer than k rewards have no part in it. k: 2, 4, 8, ... and the largest n; k = 1 is the
    success rate. Source: arXiv:2107.03374, eq. 1.
    """
    counted = []
    for values in groups:
        known = [value for value in values if value is not None]
        counted.append((len(known), known.count(1.0)))
    most = max((n for n, _ in counted), default=0)
    sizes = sorted({most, *(1 << i for i in range(1, most.bit_length()))} - {0, 1})
    return {
        k: Metric.of(1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counted if n >= k)
        for k in sizes
    }


def values_of(row: Row) -> tuple[dict[str, float], int]:
    """(name -> finite number, how many were dropped because they are not finite); unmeasured ones are absent."""
    values, num_dropped = {}, 0
    for name, metric in row.items():
        value = metric.mean if isinstance(metric, Metric) else metric
        if value is None:
            continue
        if math.isfinite(value):
            values[name] = value if isinstance(value, int) else float(value)
        else:
            num_dropped += 1
    return values, num_dropped


class MetricsWriter:
    """Sole writer of <run>/metrics.jsonl: one row a step, {"step", "time", "attempt", name: number, ...}."""

    def __init__(
        self,
        run_dir: Path | str,
        attempt: int = 0,
        strict: bool = False,
        on_row: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
    ):
        """`strict` raises on a name outside METRICS; else it is written and warned about once. on_row: told of each
        row, whether or not it reached the disk; it must not wait."""
        self._on_row = on_row
        self.num_nonfinite = self.num_lost = 0
        self._attempt, self._strict = attempt, strict
        self._warned: set[str] = set()
        self._file = open_lines(Path(run_dir) / "metrics.jsonl")

    def write(self, step: int, row: Row) -> None:
        """Raises ValueError only if strict."""
        if unknown := [n for n in unknown_names(row) if n not in self._warned]:
            message = f"metric names outside rl_jax/metrics.py METRICS: {', '.join(unknown)}; add them there"
            if self._strict:
                raise ValueError(message)
            self._warn_once(unknown, message)
        values, num_dropped = values_of(row)
        if num_dropped:
            self.num_nonfinite += num_dropped
            bad = sorted(set(row) - set(values))
            self._warn_once(
                ["nonfinite"], f"step {step}: values that are not finite were dropped: {bad}"
            )
        head = {"step": step, "time": round(time.time(), 3), "attempt": self._attempt}
        if self.num_nonfinite:
            values["nonfinite_dropped"] = self.num_nonfinite
        self._on_row(step, values)
        try:
            self._file.write(json.dumps({**head, **values}, allow_nan=False) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:  # full disk, closed file: training is worth more
            self.num_lost += 1
            self._warn_once(
                ["lost"], f"a row of metrics.jsonl was lost ({error}); counted in num_lost"
            )

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._warn_once(["lost"], f"metrics.jsonl could not be closed: {error}")

    def _warn_once(self, keys: Iterable[str], message: str) -> None:
        if not self._warned.issuperset(keys):
            self._warned.update(keys)
            LOG.warning(message)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The surviving rows of metrics.jsonl by step: a later attempt supersedes an earlier one from its first step on."""
    rows: list[dict[str, Any]] = []
    for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a killed process
            continue
        if rows and row["attempt"] > rows[-1]["attempt"]:
            # A resume may begin with an evaluation of the version that it goes on from, whose own row stays.
            first = row["step"] + any(name.startswith("time/eval_s.") for name in row)
            rows = [r for r in rows if r["step"] < first]
        rows.append(row)
    return rows
