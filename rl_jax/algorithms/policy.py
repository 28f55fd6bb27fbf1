"""What all policy algorithms share, so that each names only its advantages and its loss.

A named algorithm is a PolicyAlgorithm with `estimate` (host, once a step: rewards -> advantages) and `loss` (inside
jit: a loss a token). Round these two stand, in this order, the options of AlgorithmSettings:
1 `filter` drops groups, and members, by their task rewards, before any shaping (filters.py). 2 The rewards' own part
SHAPING, `overlong`, a reward model's score and KL in the reward shape the rewards. 3 `estimate`; its advantages bounded
and weighed by their sign (`advantage_clip`, `positive_weight`, `negative_weight`); and what of `correction` reads a
whole batch (batch_correction.py). 4 What a ratio is taken against, by `old_policy`. 5 `correction`: rejection, veto,
age, OPSM on the raw mask. What drops out is off the mask that `loss` sees, so that it has no part in a mean or sum of
its turn or sequence either; the denominators count it all the same (unless correction.denominator says otherwise), so
the other tokens' gradients do not grow. 6 `loss`, times the importance weights, detached. 7 KL in the loss and the
entropy bonus, on every trained token.
State, which a checkpoint keeps: {"kl_coef", "entropy_coef", "entropy"}, each where it adapts.

Which old policy: `behaviour` is the policy that sampled: with one update a step a ratio to the policy at step start is
exactly 1 and a clip idle, so the clip bounds what staleness does, and no importance weight is needed. `one_update` is
that ratio of 1, without a forward; `recompute` the same with one (other numerics, the learner's score); `loglinear`
lies between both by the token's age. Under these three staleness is corrected by importance weights alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rl_jax.algorithms import GRPO, correction, options
from rl_jax.algorithms.advantages import Scored, group_rewards, num_sampled, trains_scored
from rl_jax.algorithms.algorithm import Base, LossInputs, Sums
from rl_jax.algorithms.batch_correction import batch_kept, correct_batch
from rl_jax.algorithms.contract import ContractError, check_arrays, show
from rl_jax.algorithms.entropy import applied_entropy_coef, entropy_loss, next_entropy_coef
from rl_jax.algorithms.filters import select_groups
from rl_jax.algorithms.kl import kl_token_rewards, next_kl_coef, token_kl, unbiased_kl
from rl_jax.algorithms.segments import run_max, run_starts
from rl_jax.algorithms.shaping import overlong_penalty
from rl_jax.algorithms.token_losses import TokenLoss, ppo
from rl_jax.metrics import Metric
from rl_jax.settings import AlgorithmSettings, CorrectionSettings
from rl_jax.types import SHAPING, Group, Trajectory

# Part of a loss -> the figure that is its mean over the trained tokens.
FIGURES = {
    "clipped": "policy/clip_frac",
    "clipped_low": "policy/clip_frac_low",
    "clipped_high": "policy/clip_frac_high",
    "dual_clipped": "policy/dual_clip_frac",
    "reverse_kl": "policy/reverse_kl",
    "divergence": "policy/teacher_divergence",
}


class PolicyAlgorithm(Base):
    """Base of the named policy algorithms; `loss` is the PPO clip unless they have their own."""

    policy, defaults = True, GRPO  # what a plugin is that says nothing else (options.entry_of)

    def __init__(self, settings: AlgorithmSettings):
        self.settings = options.resolved(settings)
        self.needs = self.needs | options.needs(settings)

    def estimate(self, scored: Scored) -> list[np.ndarray]:
        """Advantages: one f32[T] a member, 0 off its loss mask."""
        raise TypeError(f"{type(self).__name__} has no estimate()")

    def estimate_next(self, scored: Scored, state: Any) -> tuple[list[np.ndarray], Any]:
        """(estimate, the next state): for what remembers earlier batches."""
        return self.estimate(scored), state

    def loss(self, x: LossInputs) -> TokenLoss:
        """Unreduced; x.old is the policy that ratios are taken against."""
        s = self.settings
        return ppo(
            x, clip_low=s.clip_low, clip_high=s.clip_high, dual_clip=s.dual_clip or None
        )  # fmt: skip

    # --- the Algorithm protocol ----------------------------------------------------------------------------------

    def trains(self, trajectory: Trajectory) -> bool:
        return trains_scored(trajectory, self.settings.overlong_filter)

    def select(self, groups: Sequence[Group]) -> tuple[list[Group], list[tuple[str, str]]]:
        return select_groups(groups, self.settings.filter)

    def advantages(self, groups: Sequence[Group], extras, state) -> tuple[list[np.ndarray], Any]:
        scored, state = self._scored(groups, extras, state)
        values, state = self.estimate_next(scored, state)
        values = check_arrays(self, "estimate", values, scored.members)
        values = [self._bounded(own) for own in values]
        return correct_batch(scored, values, self.settings.correction), state

    def counted(self, groups: Sequence[Group], advantages, extras):
        """Without the tokens that `correction` drops; where they count all the same, None."""
        c = self.settings.correction
        if c.denominator == "before_filter":
            return None
        scored = self._plain(groups, extras)
        x = inputs_at_start(scored, advantages)
        keep = np.asarray(corrected(x, "recompute", c)[0])
        if c.m2po:
            keep = keep & (scored.padded(batch_kept(scored, c)) > 0)
        return [k[: len(m.tokens)] for k, m in zip(keep, scored.members, strict=True)]

    def token_inputs(self, groups: Sequence[Group], advantages, extras, state):
        s, told = self.settings, {}
        if s.correction.m2po:
            told["kept"] = batch_kept(self._plain(groups, extras), s.correction)
        if not s.entropy.target:
            return told
        now = self._entropy_state(state)
        coef = now["entropy_coef"]
        if now["entropy"] is not None:
            coef = applied_entropy_coef(coef, now["entropy"], target=self.settings.entropy.target)
        members = [trajectory for group in groups for trajectory in group.trajectories]
        coefs = [np.full(len(m.tokens), coef, np.float32) for m in members]
        return {**told, "entropy_coef": coefs}

    def learned(self, state: Any, metrics: Mapping[str, Metric]) -> Any:
        e = self.settings.entropy
        entropy = metrics["policy/entropy"].mean if "policy/entropy" in metrics else None
        if not e.target or entropy is None or not np.isfinite(entropy):
            return state
        coef = next_entropy_coef(
            self._entropy_state(state)["entropy_coef"], entropy,
            target=e.target, delta=e.delta, low=e.low, high=e.high,
        )  # fmt: skip
        return {**(state or {}), "entropy_coef": coef, "entropy": entropy}

    def token_loss(self, x: LossInputs) -> tuple[Float[Array, "B K"], Sums]:
        s = self.settings
        x = with_old_policy(x, s.old_policy)
        num_tokens = x.mask.sum().astype(jnp.float32)

        def total(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.where(x.mask, values, 0).sum().astype(jnp.float32), num_tokens

        stays, keep, weights = x, x.mask, None
        if corrects(s.correction):
            keep, weights = corrected(x, s.old_policy, s.correction)
            is_counted = s.correction.denominator == "before_filter"
            stays = replace(x, mask=keep, counted=x.mask if is_counted else keep)
        out = self.loss(stays)
        if not isinstance(out, TokenLoss):
            raise ContractError(self, "loss", show(out), "a token_losses.TokenLoss(loss, parts)")
        if getattr(out.loss, "shape", None) != x.mask.shape:  # else an option may broadcast it
            want = f"the loss of each token, of shape {x.mask.shape} and not reduced"
            raise ContractError(self, "loss", f"a loss that is {show(out.loss)}", want)
        loss, sums = out.loss, {}
        parts = out.parts if weights is None else self.loss(x).parts  # figures are of all tokens
        parts = by_side(parts, x.advantages)
        for part, name in FIGURES.items():
            if part in parts:
                sums[name] = total(parts[part])
        if weights is not None:
            loss = jnp.where(keep, weights * loss, 0.0)
            sums |= {"is/rejected": total(~keep), "is/weight": total(weights)}
            sums["is/rejected_sequences"] = touched(~keep & x.mask, x)
        if s.kl.coef and x.reference_logprobs is not None:
            estimate = token_kl(x.logprobs, x.reference_logprobs, x.mask, "k3")
            sums["policy/kl"] = total(estimate)
            if s.kl.where == "loss":
                loss = loss + s.kl.coef * self._kl(x)
        coef = s.entropy_coef
        if x.entropy_coef is not None:
            coef = jnp.where(x.mask, x.entropy_coef, 0.0)
            sums["policy/entropy_coef"] = total(coef)
        if s.entropy_coef or s.entropy.target:
            loss = loss + entropy_loss(x.entropy, x.mask, coef)
        return loss, sums

    # --- parts ---------------------------------------------------------------------------------------------------

    def _bounded(self, advantages: np.ndarray) -> np.ndarray:
        """Clipped to +-advantage_clip, then weighed by the sign; the same array where neither is set."""
        s = self.settings
        if s.advantage_clip:
            advantages = np.clip(advantages, -s.advantage_clip, s.advantage_clip)
        if (s.positive_weight, s.negative_weight) == (1.0, 1.0):
            return advantages
        weights = np.where(advantages > 0, s.positive_weight, s.negative_weight)
        return (weights * advantages).astype(np.float32)

    def _kl(self, x: LossInputs) -> Float[Array, "B K"]:
        assert x.reference_logprobs is not None
        if self.settings.kl.kind == "unbiased":
            return unbiased_kl(x.logprobs, x.old, x.reference_logprobs, x.mask)
        return token_kl(x.logprobs, x.reference_logprobs, x.mask, self.settings.kl.kind)

    def _entropy_state(self, state: Any) -> dict[str, Any]:
        """The coefficient, and the entropy of the step before; None before the first."""
        return {"entropy_coef": self.settings.entropy_coef, "entropy": None, **(state or {})}

    def _plain(self, groups: Sequence[Group], extras) -> Scored:
        """The members with their task rewards."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        trained = np.array([self.trains(member) for member in members], bool)
        return Scored(members, *group_rewards(groups), trained, None, extras)

    def _scored(self, groups: Sequence[Group], extras, state) -> tuple[Scored, Any]:
        """The rewards, shaped; the next state holds an adaptive KL coefficient."""
        s, scored = self.settings, self._plain(groups, extras)
        members, rewards, valid = scored.members, scored.rewards, scored.valid
        if s.overlong.buffer:
            # Sampled, not trained, tokens: a member that rejection sampling left out is as long as it is.
            lengths = np.array([num_sampled(member) for member in members])
            rewards = rewards + np.where(valid, overlong_penalty(
                lengths, max_length=s.overlong.max_tokens, buffer=s.overlong.buffer, factor=s.overlong.factor
            ), 0.0)  # fmt: skip
        of_turns = None
        if s.reward_model_coef and s.reward_model_at == "turns":
            scores = scored.at_turn_ends(extras["reward_scores"])
            of_turns = [s.reward_model_coef * ok * own for ok, own in zip(valid, scores)]
        elif s.reward_model_coef:
            scores = s.reward_model_coef * scored.at_end(extras["reward_scores"])
            rewards = rewards + np.where(valid, scores, 0.0)
        shaping = np.array([member.reward.parts.get(SHAPING, 0.0) for member in members])
        rewards = rewards + np.where(valid, shaping, 0.0)
        scored = replace(scored, rewards=rewards, penalties=of_turns)
        if s.kl.coef and s.kl.where == "reward":
            coef = (state or {}).get("kl_coef", s.kl.coef)
            penalties, divergence = self._penalties(scored, coef)
            if of_turns is not None:
                penalties = [a + b for a, b in zip(of_turns, penalties, strict=True)]
            scored = replace(scored, penalties=penalties)
            if s.kl.target:
                coef = next_kl_coef(
                    coef, divergence,
                    target=s.kl.target, num_samples=len(members), horizon=s.kl.horizon,
                )  # fmt: skip
                state = {**(state or {}), "kl_coef": coef}
        return scored, state

    def _penalties(self, scored: Scored, coef: float) -> tuple[list[np.ndarray], float]:
        """-coef KL to the reference on each sampled token; and the mean KL of a trained sequence."""
        old = scored.extras.get("old_logprobs")
        policy = [m.logprobs for m in scored.members] if old is None else old
        reference, out, sums = scored.extras["reference_logprobs"], [], []
        for i, member in enumerate(scored.members):
            if len(reference[i]) != len(member.tokens):  # not packed: nothing of it is trained
                out.append(np.zeros(len(member.tokens)))
                continue
            pair = (np.asarray(policy[i])[None], np.asarray(reference[i])[None])
            unit = kl_token_rewards(
                *pair, member.loss_mask[None], coef=-1.0, kind=self.settings.kl.kind
            )[0]
            out.append(-coef * unit)
            if scored.trained[i]:
                sums.append(unit.sum())
        return out, float(np.mean(sums)) if sums else 0.0


def inputs_at_start(scored: Scored, advantages: Sequence[np.ndarray]) -> LossInputs:
    """What the step will see of the whole batch, before it: a member a row, log-probs of the policy at step start."""
    mask = scored.mask
    old, behaviour, values, turns = (
        jnp.asarray(scored.padded(arrays))
        for arrays in (
            scored.extras["old_logprobs"],
            [member.logprobs for member in scored.members],
            advantages,
            [member.turn_ids for member in scored.members],
        )
    )
    return LossInputs(
        logprobs=old, entropy=jnp.zeros_like(old), behaviour_logprobs=behaviour, advantages=values,
        mask=jnp.asarray(mask), segment_ids=jnp.ones(mask.shape, jnp.int32), turn_ids=turns.astype(jnp.int32),
        old_logprobs=old,
    )  # fmt: skip


def with_old_policy(x: LossInputs, old_policy: str | None) -> LossInputs:
    """The inputs with old_logprobs of the policy that ratios are taken against; None = of the one that sampled."""
    if old_policy == "one_update":
        return replace(x, old_logprobs=jax.lax.stop_gradient(jnp.where(x.mask, x.logprobs, 0.0)))
    if old_policy == "recompute":
        if x.old_logprobs is None:
            raise ValueError("old_policy=recompute needs old_logprobs: learner.score computes them")
        return x
    if old_policy == "loglinear":
        if x.lag is None:
            raise ValueError("old_policy=loglinear needs the lag of each token")
        behaviour = jnp.where(x.mask, x.behaviour_logprobs, 0.0)
        policy = jnp.where(x.mask, x.logprobs, 0.0)
        proximal, _ = correction.loglinear_proximal(policy, behaviour, x.lag)
        return replace(x, old_logprobs=proximal)
    return replace(x, old_logprobs=None)


def _gap(x: LossInputs, policy: Float[Array, "B K"] | None) -> correction.Gap:
    """Of a policy to the one that sampled."""
    assert policy is not None, "with_old_policy comes first"
    return correction.gap(policy, x.behaviour_logprobs, x.mask, x.segment_ids, x.turn_ids)


def touched(tokens: Bool[Array, "B K"], x: LossInputs) -> tuple[jax.Array, jax.Array]:
    """(sequences with at least one of these tokens, sequences that train), as sums."""
    starts = run_starts(x.segment_ids)
    live, has = (
        (run_max(mask.astype(jnp.float32), starts) * starts).sum() for mask in (x.mask, tokens)
    )
    return has, live


def by_side(
    parts: Mapping[str, jax.Array], advantages: Float[Array, "B K"]
) -> dict[str, jax.Array]:
    """The parts, and of the clipped tokens which bound holds them. A clip that looks at the advantage's sign holds from
    above where it is positive, else from below; another says itself what it holds from above (clipped_high)."""
    if "clipped" not in parts:
        return dict(parts)
    clipped = parts["clipped"]
    high = parts.get("clipped_high", clipped & (advantages > 0))
    return {**parts, "clipped_high": high, "clipped_low": clipped & ~high}


def corrects(c: CorrectionSettings) -> bool:
    tests = c.veto or c.opsm_delta or c.max_token_age or c.m2po
    return c.level != "none" or c.reject_stat != "none" or bool(tests)


def corrected(
    x: LossInputs, old_policy: str | None, c: CorrectionSettings
) -> tuple[Bool[Array, "B K"], Float[Array, "B K"]]:
    """(tokens that stay, their weights): the step's policy over the one that sampled. No gradient.

    What drops out is decided by the policy at step start: the recomputed one, else the one that trains, which is the
    same at the one update of a step; OPSM always by the latter. loglinear's guess is for weights (and ratios) alone.
    """
    now = _gap(x, x.logprobs)
    start = _gap(x, x.old_logprobs) if old_policy == "recompute" else now
    proximal = _gap(x, x.old_logprobs) if old_policy == "loglinear" else start
    keep, weights = x.mask, jnp.where(x.mask, 1.0, 0.0).astype(x.logprobs.dtype)
    if c.reject_stat != "none":
        keep = keep & correction.passes(
            start, stat=c.reject_stat, level=c.reject_level, high=c.reject_high, low=c.reject_low
        )
    if c.veto:
        keep = keep & correction.passes_veto(start, threshold=c.veto)
    if c.max_token_age and x.lag is not None:
        keep = keep & (x.lag <= c.max_token_age)
    if c.opsm_delta:
        keep = keep & correction.passes_opsm(now, x.advantages, delta=c.opsm_delta)[0]
    if c.level != "none":
        weights, outside = correction.importance_weights(
            proximal, level=c.level, mode=c.mode, high=c.high, low=c.low
        )
        if c.mode == "mask":
            keep = keep & ~outside
    if c.m2po and x.kept is not None:
        keep = keep & (x.kept > 0)
    return keep, weights
