"""Advice: what the figures of a run say is wrong, and what to do about it, from the rows of metrics.jsonl alone.

Owns: RULES, the one table of what a figure must not be; the viewer, the dashboard's alert rules and notebooks read it.
Each rule names its metric, the test, the threshold, what it means and the remedy. Invariants: pure: the same rows give
the same lines, of a run that lives or is dead; a metric that was not measured says nothing; a rule speaks only once its
test has held for `steps` steps and `seconds` seconds; where a rule of correctness speaks, those of tuning are silent
and counted: a run whose numbers are wrong is not made faster.
Kinds: correctness (do not trust the step), health (the policy or its signal decays), tuning (time or samples wasted).
Tests, of a rule's metric at a step:
above, below  the value against the threshold.
jump          the value over the median of up to 20 steps before it against the threshold.
grows         a cumulative counter grew by more than the threshold since the step before.
share         growth of a cumulative counter, less that of `less`, over the growth of `per`, across 20 steps.
open          seconds since the last row over the metric's median, where a run is said to be running.
Guards (rl_jax/guards.py) speak while a run trains, from its batches; their alarm/* figures are rules here.
Source: the advisories of miles' dashboard, NeMo-RL, verl and prime-rl for the thresholds that are not our guards'.
Must not: read a file, know a time of its own, or import anything beyond the standard library.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = Mapping[str, Any]  # a row of metrics.jsonl: step, time, attempt, and names -> numbers

KINDS = ("correctness", "health", "tuning")
TESTS = ("above", "below", "jump", "grows", "share", "open")
STEP = "time/step_s"  # rows that have it are steps; the others are evaluations and warm starts
WINDOW = 20  # steps that a jump's median and a share look back over
MIN_BEFORE = 3  # steps before a median is one


@dataclass(frozen=True)
class Rule:
    name: str  # snake_case, one a rule
    kind: str  # of KINDS
    metric: str  # of METRICS; each of its tags, .x, is judged too if has_tags
    test: str  # of TESTS
    threshold: float
    meaning: str
    remedy: str
    steps: int = 1  # in a row
    seconds: float = 0.0  # that these span; of open: at least so many
    stays: int = 0  # steps for which it is told after its last
    has_tags: bool = True
    per: str = ""  # of share
    less: str = ""  # of share
    # (metric, key of a config, share): it holds only where the metric is below that share of the setting
    only_below: tuple[str, str, float] | None = None
    if_absent: float | None = (
        None  # the value at a step whose row lacks the metric; None: not judged
    )


RULES = (
    Rule("nonfinite", "correctness", "alarm/nonfinite", "above", 0.0,
         "a figure or a gradient of the step was not finite",
         "lower learner.learning_rate, and look at mismatch/* and the batch in quarantine/", stays=20, if_absent=0.0),
    Rule("skipped_update", "correctness", "optim/skipped", "above", 0.0,
         "the update was skipped, as loss or gradient was not finite",
         "lower learner.learning_rate or learner.grad_clip; look at the longest and the rarest episodes of the step",
         stays=20),
    Rule("dropped_figures", "correctness", "nonfinite_dropped", "grows", 0.0,
         "figures were not finite and are missing in metrics.jsonl",
         "look in driver.log for their names; a gradient norm among them means a broken update", stays=20),
    Rule("zero_signal", "health", "alarm/zero_signal", "above", 0.0,
         "nothing was trained: no trained token, or every advantage was 0",
         "change the difficulty, raise rollout.group_size, or set algorithm.filter.equal_rewards", stays=5,
         if_absent=0.0),
    Rule("lag0", "correctness", "alarm/lag0", "above", 0.0,
         "trainer and sampler disagree under the same weights: numerics, not staleness",
         "check sampling settings, model.dtype against the servers', and the digests of the last sync", stays=20,
         if_absent=0.0),
    Rule("mismatch_k3", "correctness", "mismatch/k3", "above", 0.1,
         "the policy that trains is far from the one that sampled",
         "look at mismatch/k3_lag0_pure: high there is a bug of weights, template or sampling; else lower"
         " rollout.max_staleness or learner.learning_rate", steps=2, stays=5),
    Rule("mismatch_abs", "correctness", "mismatch/abs_mean", "above", 0.1,
         "log-probs of trainer and sampler differ by more than 0.1 a token",
         "as for mismatch_k3: part it by lag first", steps=2, stays=5),
    Rule("ess", "correctness", "is/ess", "below", 0.3,
         "a few tokens carry the importance weights; predicts collapse",
         "lower rollout.max_staleness or learner.learning_rate, or bound the weights with algorithm.correction",
         steps=2, stays=5),
    Rule("errored", "correctness", "episodes/errored", "share", 0.05,
         "episodes end in failures of environment, reward or server",
         "see which boundary and kind: the failures view, or ERRORED in ledger.jsonl", per="episodes/issued"),
    Rule("stalled", "correctness", STEP, "open", 6.0,
         "no step has ended for much longer than one takes",
         "read the last heartbeat lines of logs/latest/driver.log: each names what is awaited", seconds=1800.0),
    Rule("entropy_low", "health", "policy/entropy", "below", 0.05,
         "the policy has nearly become deterministic: groups will be equal, and nothing will be learned",
         "raise algorithm.entropy_coef or the temperature, lower learner.learning_rate, or stop: it may be solved",
         steps=3),
    Rule("entropy_jump", "health", "policy/entropy", "jump", 3.0,
         "entropy rose to three times what it was: a sign of instability",
         "lower learner.learning_rate, and compare samples before and after", stays=5),
    Rule("grad_norm_jump", "health", "optim/grad_norm", "jump", 10.0,
         "the gradient is ten times what it was, before clipping",
         "look at the step's longest episodes and at mismatch/*; lower learner.grad_clip or the rate", stays=5),
    Rule("zero_std", "health", "reward/zero_std_groups", "above", 0.5,
         "most groups earn the same reward in every member, so they have no gradient",
         "change the difficulty, raise rollout.group_size, or use algorithm.filter.equal_rewards and a curriculum",
         steps=5),
    Rule("truncated", "health", "length/truncated", "above", 0.25,
         "a quarter of the episodes is cut before it ends",
         "raise engine.context, rollout.max_new_tokens or the limit of turns, or penalise length", steps=3),
    Rule("clip_frac", "health", "policy/clip_frac", "above", 0.2,
         "a fifth of the trained tokens is clipped: the steps are too large for the batches",
         "lower learner.learning_rate or rollout.max_staleness", steps=3),
    Rule("aborted", "tuning", "episodes/cancelled", "share", 0.05,
         "episodes are begun and cancelled for other reasons than redundancy",
         "see the reasons in the failures view; partial rollouts keep what was sampled", seconds=1800.0,
         per="episodes/issued", less="episodes/cancelled_redundant"),
    Rule("kv_full", "tuning", "serve/kv_usage", "above", 0.9,
         "pages of the KV cache are short while slots are free",
         "raise engine.num_pages, or lower engine.slots or engine.context", steps=3,
         only_below=("serve/running", "engine.slots", 0.5)),
    Rule("mfu_low", "tuning", "perf/train_mfu", "below", 0.15,
         "the train devices do less than 15 % of what they can",
         "raise learner.microbatch_rows or the batch; look at batch/fill", steps=5),
    Rule("fill_low", "tuning", "batch/fill", "below", 0.5,
         "more than half of the packed rows is padding: shards and microbatches are uneven",
         "lower learner.row_tokens to the lengths there are, or raise rollout.batch_groups", steps=5),
    Rule("devices_wait", "tuning", "goodput/run", "below", 0.3,
         "devices do what the step needs for less than a third of its time",
         "tools.trace summarize names what each pool waits for: more servers or slots, or a larger"
         " rollout.max_staleness", steps=5, has_tags=False),
    Rule("samples_wasted", "tuning", "goodput/sample", "below", 0.5,
         "less than half of what is sampled is trained",
         "see episodes/dropped_* and cancelled for why: stale, filtered, short or redundant", steps=5),
)  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """What one rule says of one metric now."""

    rule: str
    kind: str
    metric: str  # with its tag
    first: int  # step since when it holds
    last: int  # step at which it held last
    value: float  # there
    threshold: float
    what: str  # the figure against its threshold, and when
    meaning: str
    remedy: str

    @property
    def text(self) -> str:
        """The whole line."""
        return f"{self.kind}: {self.what}: {self.meaning}; {self.remedy}"

    def record(self) -> dict[str, Any]:
        return {**vars(self), "text": self.text}


@dataclass(frozen=True)
class Advised:
    advice: tuple[Advice, ...]  # correctness first, in the table's order
    num_suppressed: int  # lines of tuning that were held back by one of correctness

    @property
    def lines(self) -> list[str]:
        held = (
            [f"({self.num_suppressed} lines of tuning advice are held back until that is mended)"]
            if self.num_suppressed
            else []
        )
        return [one.text for one in self.advice] + held


def advise(
    rows: Sequence[Row],
    config: Mapping[str, Any] | None = None,
    now_s: float | None = None,
    rules: Sequence[Rule] = RULES,
) -> Advised:
    """What is to be said after the last row.

    rows: of metrics.jsonl, by step.  config: the run's, nested, for rules that compare with a setting.
    now_s: seconds since the epoch, where the run is said to be running; None: it has ended, or nobody knows.
    """
    steps = [row for row in rows if _number(row.get(STEP)) is not None]
    found = [one for rule in rules for one in _of_rule(rule, steps, config or {}, now_s)]
    if any(one.kind == "correctness" for one in found):
        kept = [one for one in found if one.kind != "tuning"]
    else:
        kept = found
    kept.sort(key=lambda one: KINDS.index(one.kind))
    return Advised(tuple(kept), len(found) - len(kept))


def spans(rule: Rule, rows: Sequence[Row], metric: str, config: Mapping[str, Any] | None = None):
    """[(first step, last step), ...] in which the rule held for `metric` (the rule's, or one with a tag)."""
    steps = [row for row in rows if _number(row.get(STEP)) is not None]
    judged = _judged(rule, steps, metric, config or {})
    return [(run[0][0], run[-1][0]) for run in _runs(judged) if _is_long(rule, run)]


def _of_rule(
    rule: Rule, steps: Sequence[Row], config: Mapping[str, Any], now_s: float | None
) -> list[Advice]:
    if rule.test == "open":
        one = _open(rule, steps, now_s)
        return [one] if one is not None else []
    plain = _now(rule, steps, rule.metric, config)
    if plain is not None or not rule.has_tags:
        return [] if plain is None else [plain]  # its tags would say the same
    prefix = rule.metric + "."
    tagged = sorted({name for row in steps[-WINDOW:] for name in row if name.startswith(prefix)})
    return [one for name in tagged if (one := _now(rule, steps, name, config)) is not None]


def _now(rule: Rule, steps: Sequence[Row], metric: str, config: Mapping) -> Advice | None:
    """The last run of steps in which the rule held, where that is no longer ago than the rule stays."""
    long = [run for run in _runs(_judged(rule, steps, metric, config)) if _is_long(rule, run)]
    if not long:
        return None
    (first, _, _, _), (last, _, _, value) = long[-1][0], long[-1][-1]
    behind = sum(row["step"] > last for row in steps[-rule.stays - WINDOW :])
    if behind > rule.stays:
        return None
    return Advice(
        rule.name, rule.kind, metric, first, last, value, rule.threshold,
        _what(rule, metric, value, first, last), rule.meaning, rule.remedy,
    )  # fmt: skip


def _open(rule: Rule, steps: Sequence[Row], now_s: float | None) -> Advice | None:
    if now_s is None or len(steps) < MIN_BEFORE:
        return None
    usual = median(float(row[rule.metric]) for row in steps[-WINDOW:])
    open_s = now_s - float(steps[-1].get("time", now_s))
    if open_s <= max(rule.seconds, rule.threshold * usual):
        return None
    step = steps[-1]["step"]
    what = (
        f"step {step + 1} has been open for {open_s:.0f} s, {open_s / usual:.0f} times the median of"
        f" {rule.metric} (limit {rule.threshold:g} times and {rule.seconds:g} s)"
    )
    return Advice(
        rule.name, rule.kind, rule.metric, step, step, open_s / usual, rule.threshold,
        what, rule.meaning, rule.remedy,
    )  # fmt: skip


def _what(rule: Rule, metric: str, value: float, first: int, last: int) -> str:
    what = {
        "above": f"{metric}={value:.3g} is above {rule.threshold:g}",
        "below": f"{metric}={value:.3g} is below {rule.threshold:g}",
        "jump": f"{metric} is {value:.3g} times the median before it (limit {rule.threshold:g})",
        "grows": f"{metric} grew by {value:.3g}",
        "share": f"{metric} is {value:.1%} of {rule.per} (limit {rule.threshold:.0%})",
    }[rule.test]
    when = f"at step {last}" if first == last else f"in steps {first} to {last}"
    return f"{what} {when}"


Judged = tuple[int, float, bool, float]  # step, time, whether it holds, the tested value


def _judged(rule: Rule, steps: Sequence[Row], metric: str, config: Mapping) -> Iterator[Judged]:
    """Each step that has the metric."""
    before: list[float] = []
    counts: list[tuple[float, float]] = []
    for row in steps:
        value = _number(row.get(metric, rule.if_absent if metric == rule.metric else None))
        if value is None or not _is_relevant(rule, row, config):
            continue
        tested = value
        if rule.test in ("jump", "grows"):
            tested = _against(rule, value, before)
            before = [*before[-WINDOW + 1 :], value]
        elif rule.test == "share":
            less = _number(row.get(rule.less)) or 0.0
            per = _number(row.get(rule.per)) or 0.0
            counts = [*counts[-WINDOW:], (value - less, per)]
            grown = counts[-1][1] - counts[0][1]
            tested = (counts[-1][0] - counts[0][0]) / grown if grown > 0 else 0.0
        holds = tested < rule.threshold if rule.test == "below" else tested > rule.threshold
        yield int(row["step"]), float(row.get("time", 0.0)), holds, tested


def _against(rule: Rule, value: float, before: Sequence[float]) -> float:
    """0 where there is too little to compare with."""
    if (
        rule.test == "grows"
    ):  # a counter begins at 0 with each process, and is absent until it counted
        last = before[-1] if before else 0.0
        return value - last if value >= last else value
    usual = median(before) if len(before) >= MIN_BEFORE else 0.0
    return value / usual if usual > 0 else 0.0


def _is_relevant(rule: Rule, row: Row, config: Mapping) -> bool:
    if rule.only_below is None:
        return True
    name, key, share = rule.only_below
    limit: Any = config
    for part in key.split("."):
        limit = limit.get(part) if isinstance(limit, Mapping) else None
    value, limit = _number(row.get(name)), _number(limit)
    return value is not None and limit is not None and value < share * limit


def _runs(judged: Iterator[Judged]) -> list[list[Judged]]:
    """Of neighbouring steps in which it holds."""
    runs: list[list[Judged]] = []
    was = False
    for one in judged:
        if one[2]:
            if not was:
                runs.append([])
            runs[-1].append(one)
        was = one[2]
    return runs


def _is_long(rule: Rule, run: Sequence[Judged]) -> bool:
    return len(run) >= rule.steps and run[-1][1] - run[0][1] >= rule.seconds


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
