"""The settings of an algorithm before jax is there: its own values, what it needs, and what may not be combined.

Life of a setting: 1 the user's value, or None. 2 `rules` refuses what the algorithm does not read, what contradicts and
what would have no effect, one line each with the fix. 3 `resolved` puts the algorithm's own value where None is; config
does it once and every algorithm again (it changes nothing the second time), so that a value given by the user wins.
Must not: import jax, or know the mesh.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rl_jax.algorithms import ALGORITHMS, Entry
from rl_jax.settings import (
    AlgorithmSettings,
    CorrectionSettings,
    DataSettings,
    EntropySettings,
    KlSettings,
)

OWN_KEYS = tuple(dict.fromkeys(key for entry in ALGORITHMS.values() for key in entry.defaults))

PULLS = ("kimi", "opd")  # whose loss does not vanish with the advantage

# Key under "algorithm." -> the interval its number must lie in, where it is one.
INTERVALS = {
    "clip_low": "(0, 1)",
    "clip_high": "(0, inf)",
    "dual_clip": "[0, inf)",
    "gamma": "[0, 1]",
    "lam": "[0, 1]",
    "omega": "[0, inf)",
    "ratio_min": "[0, inf)",
    "ratio_max": "(0, inf)",
    "tau": "[0, inf)",
    "tau_pos": "(0, inf)",
    "tau_neg": "(0, inf)",
    "div_low": "(0, inf)",
    "div_high": "(0, inf)",
    "beta": "(0, inf)",
    "label_smoothing": "[0, 0.5]",
    "center_coef": "[0, inf)",
    "cov_share": "(0, 1]",
    "cov_coef": "(0, inf)",
    "cov_low": "(-inf, inf)",
    "cov_high": "(-inf, inf)",
    "entropy_coef": "[0, inf)",
    "reward_model_coef": "[0, inf)",
    "max_response_tokens": "[0, inf)",
    "std_eps": "(0, inf)",
    "correction.low": "[0, inf)",
    "correction.high": "(0, inf)",
    "correction.reject_low": "[0, inf)",
    "correction.reject_high": "(0, inf)",
    "correction.veto": "[0, 1]",
    "correction.opsm_delta": "[0, inf)",
    "correction.max_token_age": "[0, inf)",
    "correction.m2po": "[0, inf)",
    "entropy.target": "[0, inf)",
    "entropy.delta": "(0, inf)",
    "entropy.low": "[0, inf)",
    "entropy.high": "(0, inf)",
    "kl.coef": "[0, inf)",
    "kl.target": "[0, inf)",
    "kl.horizon": "[1, inf)",
    "overlong.buffer": "[0, inf)",
    "overlong.max_tokens": "[0, inf)",
    "overlong.factor": "(0, inf)",
    "filter.mean_above": "(-inf, inf)",
    "filter.mean_below": "(-inf, inf)",
    "filter.min_reward": "(-inf, inf)",
    "filter.best_of": "[0, inf)",
}

CHOICES = {
    "aggregation": (
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "group-mean-token-mean",
    ),
    "old_policy": ("behaviour", "recompute", "one_update", "loglinear"),
    "divergence": ("tv", "kl"),
    "weight_level": ("sequence", "token"),
    "preference": ("sigmoid", "ipo"),
    "correction.level": ("none", "token", "segment", "geometric", "sequence"),
    "correction.mode": ("truncate", "mask"),
    "correction.reject_stat": ("none", "ratio", "k2", "k3"),
    "correction.reject_level": ("token", "segment", "seq_sum", "seq_mean", "seq_max"),
    "correction.denominator": ("before_filter", "after_filter"),
    "kl.where": ("loss", "reward"),
    "kl.kind": ("k1", "k2", "k3", "k3+", "abs", "unbiased"),
}


def entry_of(settings: AlgorithmSettings) -> Entry:
    """The table's entry; that of GRPO, with every key, for an algorithm from outside the table."""
    return ALGORITHMS.get(settings.name, Entry(settings.name, ALGORITHMS["grpo"].defaults))


def resolved(settings: AlgorithmSettings) -> AlgorithmSettings:
    """The settings with the algorithm's own value for each None; what the user gave stays."""
    for key, value in entry_of(settings).defaults.items():
        if get(settings, key) is None:
            section, _, name = key.rpartition(".")
            part = getattr(settings, section) if section else settings
            part = replace(part, **{name: value})
            settings = replace(settings, **{section: part}) if section else part
    return settings


def get(settings: AlgorithmSettings, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def needs(settings: AlgorithmSettings) -> frozenset[str]:
    """What learner.score must compute for it under these options."""
    settings, out = resolved(settings), set(entry_of(settings).needs)
    if settings.old_policy == "recompute":
        out.add("old_logprobs")
    if settings.kl.coef:
        out.add("reference_logprobs")
    if settings.reward_model_coef:
        out.add("reward_scores")
    return frozenset(out)


def learns_from_rows(settings: AlgorithmSettings, data: DataSettings) -> bool:
    """Whether --mode=train of these settings is a supervised run: no servers, nothing sampled.

    Always for sft (without data.path on the task sources' scripts) and rm; for dpo where data.path is given.
    """
    rows = entry_of(settings).rows
    return bool(rows) and (bool(data.path) or rows != "pairs")


def needed_by(settings: AlgorithmSettings, need: str) -> tuple[str, str]:
    """("key=value" of the setting that asks for it, what to do instead)."""
    if need in entry_of(settings).needs or settings.name not in ALGORITHMS:
        return f"algorithm.name={settings.name}", "use an algorithm that does not need it"
    if need == "old_logprobs":
        return "algorithm.old_policy=recompute", "use one_update or behaviour"
    if need == "reward_scores":
        return f"algorithm.reward_model_coef={settings.reward_model_coef}", "set it to 0"
    return f"algorithm.kl.coef={settings.kl.coef}", "set it to 0"


def rules(given: AlgorithmSettings, group_size: int) -> Iterator[str]:
    """What is wrong with the settings together, before they are resolved; values alone are already checked."""
    settings, known = resolved(given), given.name in ALGORITHMS
    entry = entry_of(given)
    if known and entry.compares and group_size < 2:
        yield (
            f"rollout.group_size={group_size}: {given.name} compares the episodes of one task, so 1 gives no gradient;"
            " use at least 2"
        )
    if known:
        yield from _unread(given, entry)
    if entry.rows in ("pairs", "ends") and settings.aggregation != "seq-mean-token-sum":
        yield (
            f"algorithm.aggregation={settings.aggregation}: the loss of {given.name} is a pair's, whatever its tokens;"
            " set it to none"
        )
    if settings.max_response_tokens and settings.aggregation != "seq-mean-token-sum-norm":
        yield (
            f"algorithm.max_response_tokens={settings.max_response_tokens} is read only by aggregation"
            f" seq-mean-token-sum-norm, not by {settings.aggregation}; set it to 0"
        )
    if 0 < (settings.dual_clip or 0) <= 1:
        yield f"algorithm.dual_clip={settings.dual_clip} must be above 1, or 0 for none"
    low, high = settings.ratio_min, settings.ratio_max
    if low is not None and high is not None and low >= high:
        yield f"algorithm.ratio_min={low} must be below ratio_max={high}"
    low, high = settings.cov_low, settings.cov_high
    if low is not None and high is not None and low >= high:
        yield f"algorithm.cov_low={low} must be below cov_high={high}"
    if (weights := settings.reward_weights) and not any(weights.values()):
        yield (
            f"algorithm.reward_weights={dict(weights)} are all 0, which leaves no reward; weigh one part at least, or"
            " name none for the reward as a whole"
        )
    if "sum_squares" in entry.needs and (
        settings.filter.best_of or settings.filter.min_reward is not None
    ):
        yield (
            f"algorithm.filter.best_of and filter.min_reward leave members out of the forward, and the baseline of"
            f" {given.name} needs that of every member; leave them out"
        )
    if given.name == "kl_cov" and settings.old_policy in ("recompute", "one_update"):
        yield (
            f"algorithm.old_policy={settings.old_policy}: kl_cov pulls tokens back to what its ratio is taken against,"
            " and under this one the ratio is 1 at every update; use behaviour or loglinear, or clip_cov"
        )
    if entry.policy:
        yield from _correction(settings)
        yield from _kl(settings)
        yield from _entropy(settings)
        yield from _rewards(settings, group_size)


def _unread(given: AlgorithmSettings, entry: Entry) -> Iterator[str]:
    """A value that the algorithm would ignore."""
    for key in OWN_KEYS:
        value = get(given, key)
        if value is not None and key not in entry.defaults:
            readers = [name for name, other in ALGORITHMS.items() if key in other.defaults]
            yield (
                f"algorithm.{key}={value} is not read by {given.name} but by {', '.join(readers)};"
                " leave it out, or set it to none"
            )
    if not entry.policy:
        plain = AlgorithmSettings()
        if given.reward_model_coef:
            yield (
                f"algorithm.reward_model_coef={given.reward_model_coef} is not read by {given.name}; leave it out"
            )
        for section in ("correction", "kl", "entropy", "overlong", "filter"):
            own, default = getattr(given, section), getattr(plain, section)
            for name in vars(default):
                if (
                    getattr(own, name) != getattr(default, name)
                    and f"{section}.{name}" not in OWN_KEYS
                ):
                    yield f"algorithm.{section}.{name}={getattr(own, name)} is not read by {given.name}; leave it out"


def _correction(s: AlgorithmSettings) -> Iterator[str]:
    c, off = s.correction, CorrectionSettings()
    if c.level != "none" and s.old_policy in ("behaviour", None):
        fix = (
            "set algorithm.old_policy to one_update or recompute"
            if s.old_policy
            else "set it to none"
        )
        yield (
            f"algorithm.correction.level={c.level} weighs the step's policy against the one that sampled, and"
            f" {s.name} already takes its ratio against that one; {fix}"
        )
    for name in ("m2po", "batch_normalize"):
        if value := getattr(c, name):
            yield from _whole_batch(s, f"algorithm.correction.{name}={value}")
    if c.batch_normalize and c.level == "none":
        yield (
            "algorithm.correction.batch_normalize=True has no weights to normalise at correction.level=none; set a"
            " level, or leave it out"
        )
    if c.denominator == "after_filter":
        yield from _after_filter(s)
    if c.low is not None and c.high is not None and c.low >= c.high:
        yield f"algorithm.correction.low={c.low} must be below high={c.high}"
    levels = {"ratio": ("token", "segment", "seq_sum", "seq_mean")}
    levels |= dict.fromkeys(("k2", "k3"), ("token", "seq_sum", "seq_mean", "seq_max"))
    if c.reject_stat == "none":
        for name in ("reject_level", "reject_low", "reject_high"):
            if getattr(c, name) != getattr(off, name):
                yield (
                    f"algorithm.correction.{name}={getattr(c, name)} is read only with reject_stat; set reject_stat to"
                    " ratio, k2 or k3, or leave it out"
                )
        return
    if c.reject_level not in levels[c.reject_stat]:
        yield (
            f"algorithm.correction.reject_level={c.reject_level} has no {c.reject_stat};"
            f" use one of {', '.join(levels[c.reject_stat])}"
        )
    if c.reject_stat != "ratio" and c.reject_low:
        yield f"algorithm.correction.reject_low={c.reject_low} is read by stat ratio only; set it to 0"
    elif c.reject_low >= c.reject_high:
        yield f"algorithm.correction.reject_low={c.reject_low} must be below reject_high={c.reject_high}"


def _whole_batch(s: AlgorithmSettings, what: str) -> Iterator[str]:
    """What batch_correction.py cannot do."""
    if s.old_policy != "recompute":
        yield (
            f"{what} compares the whole batch with the policy at step start, before the step; it needs"
            f" algorithm.old_policy=recompute, not {s.old_policy}"
        )
    if s.name in PULLS:
        yield f"{what}: the loss of {s.name} pulls on tokens without an advantage too; set it to 0 or false"


def _after_filter(s: AlgorithmSettings) -> Iterator[str]:
    """What cannot be counted before the step."""
    c = s.correction
    drops = c.reject_stat != "none" or c.veto or c.opsm_delta or c.m2po
    drops = drops or (c.level != "none" and c.mode == "mask")
    what = "algorithm.correction.denominator=after_filter"
    yield from _whole_batch(s, what)
    if c.max_token_age:
        yield (
            f"{what}: which tokens are older than correction.max_token_age={c.max_token_age} is known in the step,"
            " after they were counted; set it to 0 and lower rollout.max_staleness"
        )
    elif not drops:
        yield (
            f"{what} has nothing to leave out: no option of algorithm.correction drops a token; set one"
            " (reject_stat, veto, opsm_delta, m2po, or a level with mode=mask), or use before_filter"
        )


def _kl(s: AlgorithmSettings) -> Iterator[str]:
    kl, off = s.kl, KlSettings()
    if not kl.coef:
        for name in ("where", "kind", "target", "horizon"):
            if getattr(kl, name) != getattr(off, name):
                yield f"algorithm.kl.{name}={getattr(kl, name)} has no effect while kl.coef is 0; set kl.coef"
        return
    if kl.where == "reward" and kl.kind in ("k3+", "unbiased"):
        yield f"algorithm.kl.kind={kl.kind} differs from k3 in the gradient only, and a reward has none; use k1 or k3"
    if kl.where == "reward" and (s.filter.best_of or s.filter.min_reward is not None):
        yield (
            "algorithm.kl.where=reward needs the KL of every member, and filter.best_of and filter.min_reward leave"
            " some out of the forward; use kl.where=loss"
        )
    if kl.where == "reward" and s.name == "opd":
        yield "algorithm.kl.where=reward: opd reads no reward; use loss"
    if kl.where == "loss" and kl.kind == "k1":
        yield "algorithm.kl.kind=k1 has an expected gradient of 0 in the loss; use k2, k3 or unbiased, or where=reward"
    if kl.where == "loss" and kl.target:
        yield f"algorithm.kl.target={kl.target} adapts the coefficient in the reward only; set it to 0"


def _entropy(s: AlgorithmSettings) -> Iterator[str]:
    e, off = s.entropy, EntropySettings()
    if not e.target:
        for name in ("delta", "low", "high"):
            if getattr(e, name) != getattr(off, name):
                yield (
                    f"algorithm.entropy.{name}={getattr(e, name)} has no effect while entropy.target is 0; set"
                    " entropy.target"
                )
    elif not e.low < e.high:
        yield f"algorithm.entropy.low={e.low} must be below entropy.high={e.high}"
    elif not e.low <= s.entropy_coef <= e.high:
        yield (
            f"algorithm.entropy_coef={s.entropy_coef}, where the coefficient starts, lies outside entropy.low={e.low}"
            f" to entropy.high={e.high}; set it between"
        )


def _rewards(s: AlgorithmSettings, group_size: int) -> Iterator[str]:
    o, f, model = s.overlong, s.filter, s.reward_model_coef
    if model and s.name == "opd":
        yield f"algorithm.reward_model_coef={model}: opd reads no reward; set it to 0"
    if model and (f.best_of or f.min_reward is not None):
        yield (
            f"algorithm.reward_model_coef={model} needs every member scored, and filter.best_of and filter.min_reward"
            " leave some out of the forward; leave them out"
        )
    if (o.buffer or o.max_tokens) and not 0 < o.buffer < o.max_tokens:
        yield (
            f"algorithm.overlong.buffer={o.buffer} must be above 0 and below overlong.max_tokens={o.max_tokens}:"
            " the penalty grows over the last `buffer` of `max_tokens`"
        )
    if f.equal_rewards and group_size < 2:
        yield (
            "algorithm.filter.equal_rewards=True drops every group of one; raise rollout.group_size to at least 2,"
            " or set it to false"
        )
    if f.best_of >= group_size and f.best_of:
        yield (
            f"algorithm.filter.best_of={f.best_of} leaves nobody out of rollout.group_size={group_size}; use less, or 0"
        )
    if f.mean_above is not None and f.mean_below is not None and f.mean_above >= f.mean_below:
        yield f"algorithm.filter.mean_above={f.mean_above} must be below mean_below={f.mean_below}"
