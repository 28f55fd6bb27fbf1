"""The settings of an algorithm before jax is there: whose values stand where none are given, and what they need.

Life of a setting: 1 the user's value, or None. 2 `passed_over` takes back what a file gave to another algorithm than
the one that was named over it; rules.py refuses what the algorithm does not read, what contradicts and what would have
no effect. 3 `resolved` puts the algorithm's own value where None is; config does it once and every algorithm again (it
changes nothing the second time), so that a value given by the user wins.
A plugin's class says the same things as attributes of the same names as Entry's fields. They are known once its module
is imported (preflight.py), which config does not do; until then nothing is read, resolved or refused for it.
Must not: import jax or a plugin, or know the mesh.
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rl_jax.algorithms import ALGORITHMS, Entry
from rl_jax.settings import AlgorithmSettings, DataSettings

# needs that are computed inside the step, by nobody before it
IN_STEP = frozenset({"teacher_divergence"})
# of the options that every policy algorithm takes
SHARED_SECTIONS = ("correction", "kl", "entropy", "overlong", "filter")
OWN_KEYS = tuple(dict.fromkeys(key for entry in ALGORITHMS.values() for key in entry.defaults))

# Key under "algorithm." -> the interval its number must lie in, where it is one.
INTERVALS = {
    "clip_low": "(0, 1)",
    "clip_high": "(0, inf)",
    "dual_clip": "[0, inf)",
    "gamma": "[0, 1]",
    "lam": "[0, 1]",
    "critic_lam": "[0, 1]",
    "lam_alpha": "[0, inf)",
    "nll_coef": "[0, inf)",
    "decay": "[0, 1)",
    "omega": "[0, inf)",
    "ratio_min": "[0, inf)",
    "ratio_max": "(0, inf)",
    "tau": "[0, inf)",
    "tau_pos": "(0, inf)",
    "tau_neg": "(0, inf)",
    "div_low": "(0, inf)",
    "div_high": "(0, inf)",
    "beta": "(0, inf)",
    "jsd_beta": "[0, 1]",
    "label_smoothing": "[0, 0.5]",
    "center_coef": "[0, inf)",
    "reward_coef": "[0, inf)",
    "teacher_coef": "[0, inf)",
    "cov_share": "(0, 1]",
    "cov_coef": "(0, inf)",
    "cov_low": "(-inf, inf)",
    "cov_high": "(-inf, inf)",
    "entropy_coef": "[0, inf)",
    "advantage_clip": "[0, inf)",
    "positive_weight": "[0, inf)",
    "negative_weight": "[0, inf)",
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
    "reward_model_at": ("end", "turns"),
    "std_scope": ("group", "batch", "none"),
    "correction.level": ("none", "token", "segment", "geometric", "sequence"),
    "correction.mode": ("truncate", "mask"),
    "correction.reject_stat": ("none", "ratio", "k2", "k3"),
    "correction.reject_level": ("token", "segment", "seq_sum", "seq_mean", "seq_max"),
    "correction.denominator": ("before_filter", "after_filter"),
    "kl.where": ("loss", "reward"),
    "kl.kind": ("k1", "k2", "k3", "k3+", "abs", "unbiased"),
}


def entry_of(settings: AlgorithmSettings) -> Entry:
    """The table's entry, or what a loaded plugin says; one that reads and refuses nothing before it is loaded."""
    return _entry(settings.name) or Entry(settings.name, {}, compares=False)


def is_known(settings: AlgorithmSettings) -> bool:
    """Whether entry_of tells all: a name of the table or the class of one, or a plugin that is loaded."""
    return _entry(settings.name) is not None


def _entry(name: str) -> Entry | None:
    of_target = {entry.target: entry for entry in ALGORITHMS.values()}
    if (entry := ALGORITHMS.get(name, of_target.get(name))) is not None:
        return entry
    module, _, attribute = name.partition(":")
    plugin: Any = sys.modules.get(module)
    for part in attribute.split("."):
        plugin = getattr(plugin, part, None)
    return None if plugin is None else _said(name, plugin, of_target)


def _said(target: str, plugin: Any, of_target: Mapping[str, Entry]) -> Entry:
    """Each field by the nearest of the class and its bases that says it, itself or by its line of the table; `needs`
    are those of all of them."""
    nearest: dict[str, Any] = {}
    needs: frozenset[str] = frozenset()
    kinds = {"defaults": Mapping, "needs": (set, frozenset)}
    for base in getattr(plugin, "__mro__", (plugin,)):
        line = of_target.get(f"{base.__module__}:{base.__qualname__}")
        said = vars(base) if line is None else line._asdict()
        own = {f: said[f] for f in Entry._fields if isinstance(said.get(f), kinds.get(f, bool))}
        needs |= frozenset(own.pop("needs", ()))
        nearest = {**own, **nearest}
    defaults = {"aggregation": "token-mean", **nearest.pop("defaults", {})}  # of its tokens' losses
    return Entry(target, defaults, **{"policy": False, **nearest}, needs=needs)


def keys(section: Any = None, prefix: str = "") -> tuple[str, ...]:
    """Dotted keys of an algorithm's settings."""
    section = AlgorithmSettings() if section is None else section
    out: list[str] = []
    for f in fields(section):
        value = getattr(section, f.name)
        out += keys(value, f"{prefix}{f.name}.") if is_dataclass(value) else [prefix + f.name]
    return tuple(out)


def resolved(settings: AlgorithmSettings) -> AlgorithmSettings:
    """The settings with the algorithm's own value for each None; what the user gave stays."""
    for key, value in entry_of(settings).defaults.items():
        if key in KEYS and get(settings, key) is None:
            settings = with_value(settings, key, value)
    if settings.kl.kind is None:
        own = "k1" if settings.kl.where == "reward" else "k3"
        settings = with_value(settings, "kl.kind", own)
    return settings


def unread(entry: Entry) -> Iterator[str]:
    """The keys that an algorithm ignores; those of options that all policy algorithms share, where it is none."""
    sections = SHARED_SECTIONS
    if entry.policy:
        sections = () if entry.reads_reward else ("overlong",)
    for key in KEYS:
        is_own = key in OWN_KEYS
        if key not in entry.defaults if is_own else key.partition(".")[0] in sections:
            yield key


def passed_over(settings: AlgorithmSettings, chosen: Collection[str] | None) -> AlgorithmSettings:
    """The settings without what a file gave to another algorithm: the name was chosen over the file's.

    chosen: full keys that somebody chose for this very algorithm, which stay, also where it does not read them. None =
    all of them. Nothing changes for a plugin that is not loaded.
    """
    if chosen is None or not is_known(settings):
        return settings
    entry, plain = entry_of(settings), AlgorithmSettings()
    has_pairs = entry.rows in ("pairs", "ends")  # their aggregation cannot be chosen
    of_pairs = ("aggregation", "max_response_tokens") if has_pairs else ()
    for key in (*unread(entry), *of_pairs):
        full = f"algorithm.{key}"
        if not any(c == full or c.startswith(f"{full}.") for c in chosen):
            settings = with_value(settings, key, get(plain, key))
    return settings


def get(settings: AlgorithmSettings, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_value(settings: AlgorithmSettings, key: str, value: Any) -> AlgorithmSettings:
    """The settings with another value of a dotted key."""
    section, _, name = key.rpartition(".")
    part = getattr(settings, section) if section else settings
    part = replace(part, **{name: value})
    return replace(settings, **{section: part}) if section else part


def is_given(settings: AlgorithmSettings, key: str) -> bool:
    """Whether it is somebody's choice: neither the default nor the algorithm's own value."""
    value, plain = get(settings, key), AlgorithmSettings()
    own = resolved(with_value(settings, key, None)) if get(plain, key) is None else plain
    return value is not None and value != get(own, key)


def needs(settings: AlgorithmSettings) -> frozenset[str]:
    """What learner.score must compute for it under these options."""
    settings, out = resolved(settings), set(entry_of(settings).needs)
    if settings.old_policy == "recompute":
        out.add("old_logprobs")
    if settings.kl.coef:
        out.add("reference_logprobs")
    if settings.reward_model_coef:
        out.add("reward_scores")
    if settings.teacher_coef:
        out.add("teacher_logprobs")
    return frozenset(out)


def needed_by(settings: AlgorithmSettings, need: str) -> tuple[str, str]:
    """("key=value" of the setting that asks for it, what to do instead)."""
    if need not in entry_of(settings).needs:
        if need == "old_logprobs" and resolved(settings).old_policy == "recompute":
            return "algorithm.old_policy=recompute", "use one_update or behaviour"
        if need == "reward_scores" and settings.reward_model_coef:
            return f"algorithm.reward_model_coef={settings.reward_model_coef}", "set it to 0"
        if need == "teacher_logprobs" and (coef := resolved(settings).teacher_coef):
            return f"algorithm.teacher_coef={coef}", "set it to 0"
        if need == "reference_logprobs" and settings.kl.coef:
            return f"algorithm.kl.coef={settings.kl.coef}", "set it to 0"
    return f"algorithm.name={settings.name}", "use an algorithm that does not need it"


def learns_from_rows(settings: AlgorithmSettings, data: DataSettings) -> bool:
    """Whether --mode=train of these settings is a supervised run: no servers, nothing sampled.

    Always for sft (without data.path on the task sources' scripts) and rm; for dpo where data.path is given.
    """
    rows = entry_of(settings).rows
    return bool(rows) and (bool(data.path) or rows != "pairs")


KEYS = keys()
