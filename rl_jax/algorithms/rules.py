"""What is wrong with an algorithm's settings together: one error line each, `key=value what; the remedy`.

Three kinds: a value that the algorithm does not read, values that contradict each other, and a value that has no effect
beside the others. Values alone are checked before, by options.INTERVALS and CHOICES.
Must not: import jax or a plugin, know the mesh, or know an algorithm by its name (Entry says what it is like).
"""

from collections.abc import Iterator

from rl_jax.algorithms import ALGORITHMS, Entry
from rl_jax.algorithms.options import (
    KEYS,
    OWN_KEYS,
    entry_of,
    get,
    is_given,
    is_known,
    resolved,
    unread,
)
from rl_jax.settings import AlgorithmSettings

NUM_READERS = 6  # algorithms that are named where a key is not read

# What stands at its middle, or is multiplied by nothing, where every ratio is 1.
_OF_RATIO = (
    "clip_low", "clip_high", "dual_clip", "ratio_min", "ratio_max", "tau", "tau_pos", "tau_neg", "divergence",
    "div_low", "div_high",
)  # fmt: skip
_REJECT_LEVELS = {
    "ratio": ("token", "segment", "seq_sum", "seq_mean"),
    "k2": ("token", "seq_sum", "seq_mean", "seq_max"),
    "k3": ("token", "seq_sum", "seq_mean", "seq_max"),
}


def rules(given: AlgorithmSettings, group_size: int) -> Iterator[str]:
    """What is wrong, before the settings are resolved; nothing of a plugin that is not loaded."""
    if not is_known(given):
        return
    settings, entry = resolved(given), entry_of(given)
    yield from _plugin(given, entry)
    if entry.compares and group_size < 2:
        yield (
            f"rollout.group_size={group_size}: {given.name} compares the episodes of one task, so 1 gives no gradient;"
            " use at least 2"
        )
    yield from _unread(given, entry)
    yield from _contradictions(settings, entry)
    yield from _idle(settings)
    if entry.policy:
        yield from _correction(settings, entry)
        yield from _kl(settings, entry)
        yield from _entropy(settings)
        yield from _rewards(settings, entry, group_size)


def _plugin(s: AlgorithmSettings, entry: Entry) -> Iterator[str]:
    """What only a class from outside the table can get wrong."""
    if s.name in ALGORITHMS:
        return
    plain = AlgorithmSettings()
    for key, value in entry.defaults.items():
        if key not in KEYS:
            yield f"algorithm.name={s.name}: its defaults name {key}, which is no setting of an algorithm"
        elif get(plain, key) is not None and get(plain, key) != value:
            yield (
                f"algorithm.name={s.name}: its defaults have {key}={value}, but that default is {get(plain, key)} for"
                f" every algorithm; give it in the config"
            )


def _unread(given: AlgorithmSettings, entry: Entry) -> Iterator[str]:
    """A value that the algorithm would ignore."""
    plain = AlgorithmSettings()
    for key in unread(entry):
        value, default = get(given, key), get(plain, key)
        if key not in OWN_KEYS:
            if is_given(given, key):
                yield f"algorithm.{key}={value} is not read by {given.name}; leave it out"
        elif value != default:
            readers = [name for name, other in ALGORITHMS.items() if key in other.defaults]
            more = " and others" if len(readers) > NUM_READERS else ""
            yield (
                f"algorithm.{key}={value} is not read by {given.name} but by {', '.join(readers[:NUM_READERS])}{more};"
                f" leave it out, or set it to {'none' if default is None else default}"
            )


def _contradictions(s: AlgorithmSettings, entry: Entry) -> Iterator[str]:
    if entry.rows in ("pairs", "ends") and s.aggregation != "seq-mean-token-sum":
        yield (
            f"algorithm.aggregation={s.aggregation}: the loss of {s.name} is a pair's, whatever its tokens;"
            " set it to none"
        )
    if 0 < (s.dual_clip or 0) <= 1:
        yield f"algorithm.dual_clip={s.dual_clip} must be above 1, or 0 for none"
    for low, high in (("ratio_min", "ratio_max"), ("cov_low", "cov_high")):
        a, b = get(s, low), get(s, high)
        if a is not None and b is not None and a >= b:
            yield f"algorithm.{low}={a} must be below {high}={b}"
    if not s.positive_weight and not s.negative_weight:
        yield (
            "algorithm.positive_weight and negative_weight are both 0, which leaves no advantage; weigh one at least"
        )
    if s.reward_coef == 0:
        yield (
            f"algorithm.reward_coef={s.reward_coef} leaves the reward out of {s.name}; raise it, or use opd, which"
            " reads none"
        )
    if (weights := s.reward_weights) and not any(weights.values()):
        yield (
            f"algorithm.reward_weights={dict(weights)} are all 0, which leaves no reward; weigh one part at least, or"
            " name none for the reward as a whole"
        )
    if "sum_squares" in entry.needs and (s.filter.best_of or s.filter.min_reward is not None):
        yield (
            f"algorithm.filter.best_of and filter.min_reward leave members out of the forward, and the baseline of"
            f" {s.name} needs that of every member; leave them out"
        )
    if entry.needs_lag and s.old_policy in ("recompute", "one_update"):
        yield (
            f"algorithm.old_policy={s.old_policy}: {s.name} pulls tokens back to what its ratio is taken against,"
            " and under this one the ratio is 1 at every update; use behaviour or loglinear"
        )


def _idle(s: AlgorithmSettings) -> Iterator[str]:
    """What was given and has no effect beside the other values."""
    if s.max_response_tokens and s.aggregation != "seq-mean-token-sum-norm":
        yield (
            f"algorithm.max_response_tokens={s.max_response_tokens} is read only by aggregation"
            f" seq-mean-token-sum-norm, not by {s.aggregation}; set it to 0"
        )
    if s.old_policy == "one_update":
        for key in filter(lambda key: is_given(s, key), _OF_RATIO):
            value = get(s, key)
            if (key == "ratio_min" and value > 1) or (key == "ratio_max" and value < 1):
                continue
            yield (
                f"algorithm.{key}={value} has no effect at algorithm.old_policy=one_update, where every ratio is 1;"
                " leave it out, or use behaviour, recompute or loglinear"
            )
    if is_given(s, "std_eps") and (s.std_scope == "none" or s.normalize is False):
        off = "std_scope=none" if s.std_scope == "none" else "normalize=false"
        yield f"algorithm.std_eps={s.std_eps} has no effect at {off}, which divides by nothing; leave it out"
    if s.lam_alpha and s.critic_lam is not None and is_given(s, "lam"):
        yield (
            f"algorithm.lam={s.lam} has no effect beside lam_alpha={s.lam_alpha}, which is the policy's, and"
            f" critic_lam={s.critic_lam}, the critic's; leave it out"
        )
    if s.preference == "ipo" and s.label_smoothing:
        yield f"algorithm.label_smoothing={s.label_smoothing} is read by preference=sigmoid only; set it to 0"


def _correction(s: AlgorithmSettings, entry: Entry) -> Iterator[str]:
    c = s.correction
    if c.level == "none":
        for name in ("mode", "low", "high"):
            if is_given(s, f"correction.{name}"):
                yield (
                    f"algorithm.correction.{name}={getattr(c, name)} bounds importance weights, and there are none at"
                    " correction.level=none; set a level, or leave it out"
                )
    elif s.old_policy in ("behaviour", None):
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
            yield from _whole_batch(s, entry, f"algorithm.correction.{name}={value}")
    if c.batch_normalize and c.level == "none":
        yield (
            "algorithm.correction.batch_normalize=True has no weights to normalise at correction.level=none; set a"
            " level, or leave it out"
        )
    if c.denominator == "after_filter":
        yield from _after_filter(s, entry)
    if c.level != "none" and c.low is not None and c.high is not None and c.low >= c.high:
        yield f"algorithm.correction.low={c.low} must be below high={c.high}"
    if c.reject_stat == "none":
        for name in ("reject_level", "reject_low", "reject_high"):
            if is_given(s, f"correction.{name}"):
                yield (
                    f"algorithm.correction.{name}={getattr(c, name)} is read only with reject_stat; set reject_stat to"
                    " ratio, k2 or k3, or leave it out"
                )
        return
    if c.reject_level not in _REJECT_LEVELS[c.reject_stat]:
        yield (
            f"algorithm.correction.reject_level={c.reject_level} has no {c.reject_stat};"
            f" use one of {', '.join(_REJECT_LEVELS[c.reject_stat])}"
        )
    if c.reject_stat != "ratio" and c.reject_low:
        yield f"algorithm.correction.reject_low={c.reject_low} is read by stat ratio only; set it to 0"
    elif c.reject_low >= c.reject_high:
        yield f"algorithm.correction.reject_low={c.reject_low} must be below reject_high={c.reject_high}"


def _whole_batch(s: AlgorithmSettings, entry: Entry, what: str) -> Iterator[str]:
    """What batch_correction.py cannot do."""
    if s.old_policy != "recompute":
        yield (
            f"{what} compares the whole batch with the policy at step start, before the step; it needs"
            f" algorithm.old_policy=recompute, not {s.old_policy}"
        )
    if s.nll_coef:
        yield f"{what}: algorithm.nll_coef={s.nll_coef} pulls on tokens whatever their advantage; set one of them to 0"
    if entry.pulls:
        yield f"{what}: the loss of {s.name} pulls on tokens without an advantage too; set it to 0 or false"


def _after_filter(s: AlgorithmSettings, entry: Entry) -> Iterator[str]:
    """What cannot be counted before the step."""
    c = s.correction
    drops = c.reject_stat != "none" or c.veto or c.opsm_delta or c.m2po
    drops = drops or (c.level != "none" and c.mode == "mask")
    what = "algorithm.correction.denominator=after_filter"
    yield from _whole_batch(s, entry, what)
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


def _kl(s: AlgorithmSettings, entry: Entry) -> Iterator[str]:
    kl = s.kl
    if not kl.coef:
        for name in ("where", "kind", "target", "horizon"):
            if is_given(s, f"kl.{name}"):
                yield f"algorithm.kl.{name}={getattr(kl, name)} has no effect while kl.coef is 0; set kl.coef"
        return
    if kl.where == "reward" and kl.kind in ("k3+", "unbiased"):
        yield f"algorithm.kl.kind={kl.kind} differs from k3 in the gradient only, and a reward has none; use k1 or k3"
    if kl.where == "reward" and (s.filter.best_of or s.filter.min_reward is not None):
        yield (
            "algorithm.kl.where=reward needs the KL of every member, and filter.best_of and filter.min_reward leave"
            " some out of the forward; use kl.where=loss"
        )
    if kl.where == "reward" and not entry.reads_reward:
        yield f"algorithm.kl.where=reward: {s.name} reads no reward; use loss"
    if kl.where == "loss" and kl.kind == "k1":
        yield "algorithm.kl.kind=k1 has an expected gradient of 0 in the loss; use k2, k3 or unbiased, or where=reward"
    if kl.where == "loss" and kl.target:
        yield f"algorithm.kl.target={kl.target} adapts the coefficient in the reward only; set it to 0"
    if not kl.target and is_given(s, "kl.horizon"):
        yield f"algorithm.kl.horizon={kl.horizon} has no effect while kl.target is 0; set kl.target, or leave it out"


def _entropy(s: AlgorithmSettings) -> Iterator[str]:
    e = s.entropy
    if not e.target:
        for name in ("delta", "low", "high"):
            if is_given(s, f"entropy.{name}"):
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


def _rewards(s: AlgorithmSettings, entry: Entry, group_size: int) -> Iterator[str]:
    o, f, model = s.overlong, s.filter, s.reward_model_coef
    if model and not entry.reads_reward:
        yield f"algorithm.reward_model_coef={model}: {s.name} reads no reward; set it to 0"
    if s.reward_model_at != "end" and not model:
        yield (
            f"algorithm.reward_model_at={s.reward_model_at} has no effect while reward_model_coef is 0; set"
            " reward_model_coef, or leave it out"
        )
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
    elif not o.buffer and is_given(s, "overlong.factor"):
        yield (
            f"algorithm.overlong.factor={o.factor} has no effect while overlong.buffer is 0; set overlong.buffer and"
            " overlong.max_tokens, or leave it out"
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
