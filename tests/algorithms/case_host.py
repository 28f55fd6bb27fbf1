"""Operations of the worked cases that compute their outputs from the inputs as they are -> our functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.algorithms import agent_advantages as agents
from rl_jax.algorithms import correction, curriculum, distillation, filters, kl, shaping, staleness
from rl_jax.algorithms import group_advantages as group
from rl_jax.algorithms import token_advantages as token
from rl_jax.algorithms.advantages import trains_scored
from rl_jax.algorithms.aggregate import token_weights
from rl_jax.algorithms.entropy import applied_entropy_coef, next_entropy_coef
from rl_jax.algorithms.preference import Side, pair_loss
from rl_jax.algorithms.routing import replayed_gate
from rl_jax.engine.sampling import allowed_tokens
from rl_jax.learner.logprobs import token_logprobs
from rl_jax.learner.mismatch import mismatch_metrics, mismatch_totals
from rl_jax.testing.trajectories import fake_trajectory
from rl_jax.types import Outcome
from tests.algorithms.case_ops import Arrays, HostOp, Outputs, Params, chosen, runs


def on_tokens(seq_advantages: np.ndarray, mask: Any) -> Outputs:
    tokens = np.where(np.asarray(mask) != 0, seq_advantages[:, None], 0.0)
    return {"seq_advantages": seq_advantages, "token_advantages": tokens}


def by_group(estimate: Callable, *names: str) -> HostOp:
    def run(a: Arrays, p: Params) -> Outputs:
        options = chosen(p, **{name: name for name in names})
        values = estimate(a["rewards"], a["groups"], a.get("valid"), **options)
        return on_tokens(values, a["mask"])

    return HostOp(run)


def opo(a: Arrays, p: Params) -> Outputs:
    lengths = (np.asarray(a["mask"]) != 0).sum(axis=1)
    return on_tokens(
        group.length_weighted(a["rewards"], a["groups"], lengths, a.get("valid")), a["mask"]
    )


def gdpo(a: Arrays, p: Params) -> Outputs:
    options = chosen(p, weights="weights", eps="eps")
    values = group.multi_reward(a["reward_components"], a["groups"], a.get("valid"), **options)
    return on_tokens(values, a["mask"])


def gae(a: Arrays, p: Params) -> Outputs:
    options = chosen(p, gamma="gamma", lam="lam")
    advantages, returns = token.gae(
        a["token_rewards"], a["values"], a["mask"], a.get("bootstrap"), **options
    )
    whitened = token.whiten(advantages, a["mask"])
    return {"advantages": advantages, "returns": returns, "whitened": whitened}


def gigpo(a: Arrays, p: Params) -> Outputs:
    trajectories = agents.dense_ids(list(a["traj"]))
    returns = agents.step_returns(
        trajectories, a["step_index"], a["step_rewards"], p.get("gamma", 0.95)
    )
    both, episode, step = agents.group_in_group(
        trajectories, a["groups"], list(a["states"]), returns, a["episode_returns"],
        **chosen(p, omega="omega", std_scope="std_scope", eps="eps"),
    )  # fmt: skip
    return {
        "step_returns": returns,
        "episode_advantages": episode,
        "step_advantages": step,
        "advantages": both,
    }


def otb(a: Arrays, p: Params) -> Outputs:
    advantages, weights = token.optimal_token_baseline(
        a["token_rewards"], a["mask"], a["old_logp"], a["sum_pi_sq"], a["groups"]
    )
    return {"token_advantages": advantages, "weights": weights}


def process_grpo(a: Arrays, p: Params) -> Outputs:
    options = chosen(p, eps="eps")
    values = token.process_normalised(
        a["step_rewards"], a["step_ends"], a["groups"], a["mask"], **options
    )
    return {"token_advantages": values}


def reinforce_pp(a: Arrays, p: Params) -> Outputs:
    returns = token.discounted_returns(a["token_rewards"], a["mask"], p.get("gamma", 1.0))
    return {"returns": returns, "token_advantages": token.whiten(returns, a["mask"])}


def reinforce_pp_baseline(a: Arrays, p: Params) -> Outputs:
    centred = group.group_normalised(a["rewards"], a["groups"], a.get("valid"), std_scope="none")
    tokens = np.where(np.asarray(a["mask"]) != 0, centred[:, None], 0.0)
    return {"centered": tokens, "token_advantages": token.whiten(tokens, a["mask"])}


def role_ema(a: Arrays, p: Params) -> Outputs:
    values, after = agents.role_baselined(a["rewards"], a["roles"], {}, decay=p.get("decay", 0.95))
    return {"seq_advantages": values, "baselines": after}


def role_groups(a: Arrays, p: Params) -> Outputs:
    values = agents.role_centred(
        a["rewards"], a["roles"], a["episodes"], a["groups"], episode_roles=p["episode_roles"]
    )
    return {"seq_advantages": values}


def turn_returns(a: Arrays, p: Params) -> Outputs:
    rows = zip(a["turn_rewards"], runs(a["mask"]), np.asarray(a["mask"]) != 0)
    gamma = p.get("gamma", 1.0)
    return {
        "token_returns": [
            agents.on_turns(agents.turn_returns(rewards, gamma), turns, mask)
            for rewards, turns, mask in rows
        ]
    }


def whiten(a: Arrays, p: Params) -> Outputs:
    return {"whitened": token.whiten(a["x"], a["mask"], shift=p.get("shift", True))}


def whiten_dp(a: Arrays, p: Params) -> Outputs:
    shards = [(a["x"][rows], a["mask"][rows]) for rows in p["shards"]]
    order = np.argsort(np.concatenate(p["shards"]))
    local = [token.whiten(*shard) for shard in shards]
    return {
        "whitened": np.concatenate(token.whiten_parts(shards))[order],
        "wrong_local_whitening": np.concatenate(local)[order],
    }


def microbatches(a: Arrays, p: Params) -> Outputs:
    mask = np.asarray(a["mask"]) != 0
    options = {"norm_length": p.get("norm_len", 0)}
    x = np.where(mask, a["x"], 0.0)
    weighted = token_weights(mask, p["agg"], **options) * x
    parts = [weighted[rows].sum() for rows in p["splits"]]
    alone = [
        (token_weights(mask[rows], p["agg"], **options) * x[rows]).sum() for rows in p["splits"]
    ]
    return {
        "loss": weighted.sum(),
        "parts": parts,
        "sum_of_parts": sum(parts),
        "wrong_mean_of_means": np.mean(alone),
    }


def dump(a: Arrays, p: Params) -> Outputs:
    options = chosen(p, window="window", tau="tau", floor="floor")
    probs, scores, means = curriculum.dump_probs(a["advantages"], a["counts"], **options)
    return {"probs": probs, "scores": scores, "mean_abs_adv": means}


def spo(a: Arrays, p: Params) -> Outputs:
    advantages, raw, baseline = curriculum.spo_advantages(a["alpha"], a["beta"], a["rewards"])
    alpha, beta, rho = curriculum.spo_update(a["alpha"], a["beta"], a["rewards"], a["drift"])
    return {
        "advantages": advantages,
        "raw_advantages": raw,
        "baseline": baseline,
        "rho": rho,
        "alpha": alpha,
        "beta": beta,
        "sample_probs": curriculum.spo_probs(alpha, beta),
    }


def dynamic_sampling(a: Arrays, p: Params) -> Outputs:
    kept = filters.informative_groups(a["rewards"], a["groups"], a.get("valid"))
    rows = np.flatnonzero(np.isin(a["groups"], kept))
    return {"kept_groups": kept, "kept_rows": rows, "enough": len(kept) >= p.get("need_groups", 0)}


def difficulty(a: Arrays, p: Params) -> Outputs:
    bounds = {"low": p.get("low", 0.0), "high": p.get("high", 1.0)}
    return {
        "kept_groups": filters.groups_in_band(a["rewards"], a["groups"], a.get("valid"), **bounds)
    }


def dpo(a: Arrays, p: Params) -> Outputs:
    options = chosen(p, beta="beta", kind="type", label_smoothing="label_smoothing")

    def sides(up, down):
        return (
            Side(up, a["ref_chosen"], np.asarray(a["mask_chosen"]) != 0),
            Side(down, a["ref_rejected"], np.asarray(a["mask_rejected"]) != 0),
        )

    @jax.jit
    def mean(up, down):
        out = pair_loss(*sides(up, down), **options)
        num_pairs = jnp.maximum(out.live.sum(), 1)
        right = jnp.where(out.live, out.margin > 0, False).sum() / num_pairs
        return out.loss.sum() / num_pairs, (out.loss, out.margin, right)

    run = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)
    (loss, (each, margin, right)), (up, down) = run(*map(jnp.asarray, (a["chosen"], a["rejected"])))
    return {
        "loss": loss,
        "pair_loss": each,
        "grad_chosen": up,
        "grad_rejected": down,
        "reward_margin": margin,
        "accuracy": right,
    }


def distill_full(a: Arrays, p: Params) -> Outputs:
    mask, beta = np.asarray(a["mask"]) != 0, p.get("beta", 0.5)
    teacher = jnp.asarray(a["teacher_logits"])
    weights = token_weights(mask, "token-mean")

    def mean(of):
        def total(student):
            return (weights * of(student, teacher)).sum()

        return jax.jit(jax.value_and_grad(total))(jnp.asarray(a["student_logits"]))

    forward, grad_forward = mean(distillation.forward_kl)
    reverse, grad_reverse = mean(distillation.reverse_kl)
    jsd, _ = mean(lambda s, t: distillation.generalised_jsd(s, t, beta))
    return {
        "forward_kl": forward,
        "reverse_kl": reverse,
        "jsd": jsd,
        "grad_forward": grad_forward,
        "grad_reverse": grad_reverse,
    }


def entropy_adaptive(a: Arrays, p: Params) -> Outputs:
    coef, target, applied = p.get("init", 0.0), p.get("target", 0.2), []
    limits = {"delta": p.get("delta", 0.005), "low": p.get("min", 0.0), "high": p.get("max", 1.0)}
    for h in np.asarray(a["entropies"], float).tolist():
        applied.append(applied_entropy_coef(coef, h, target=target))
        coef = next_entropy_coef(coef, h, target=target, **limits)
    return {"applied_coef": applied, "next_coef": coef}


def m2po(a: Arrays, p: Params) -> Outputs:
    keep = correction.m2po_keep(
        a["old_logp"], a["rollout_logp"], a["mask"], **chosen(p, threshold="threshold")
    )
    return {"keep": keep, "dropped": int((np.asarray(a["mask"]) != 0).sum() - keep.sum())}


TOTALS = jax.jit(mismatch_totals, compiler_options={"xla_backend_optimization_level": 0})


def measures(a: Arrays, p: Params) -> Outputs:
    """What a step logs, of its trained tokens as they lie in the rows."""
    names = {
        "abs_mean": "abs_logp_diff",
        "abs_max": "max_abs_logp_diff",
        "abs_prob": "abs_prob_diff",
        "ppl_gap": "log_ppl_gap_mean",
        "ppl_gap_abs": "log_ppl_gap_abs",
        "chi2": "chi2_token",
        "chi2_sequence": "chi2_seq",
        "ess": "ess_token",
        "ess_sequence": "ess_seq",
    }
    mask = np.asarray(a["mask"]) != 0
    every = [a["train_logp"], a["rollout_logp"], mask, 0 * mask, 0 * mask > 0, 0 * mask + 1]
    totals = TOTALS(*(jnp.asarray(x)[None] for x in every))
    metrics = mismatch_metrics(jax.device_get(totals))
    found = {name.rpartition("/")[2]: metric.mean for name, metric in metrics.items()}
    return {names.get(name, name): value for name, value in found.items()}


def replay(a: Arrays, p: Params) -> Outputs:
    ids = np.asarray(a["replay_ids"], np.int32)[:, : p.get("top_k")]
    options = chosen(p, scoring="scoring", norm_topk="norm_topk", scale="scale")
    options |= chosen(a, select_bias="select_bias")

    @jax.jit
    def run(logits):
        gate, used = replayed_gate(logits, ids, **options)
        return (gate * a["cotangent"]).sum(), (gate, used)

    (_, (gate, used)), grad = jax.value_and_grad(run, has_aux=True)(jnp.asarray(a["router_logits"]))
    return {"weights": gate, "expert_ids": used, "grad_logits": grad}


def logprob(a: Arrays, p: Params) -> Outputs:
    targets, keep = np.asarray(a["targets"]), None
    if "keep_ids" in a:
        keep = np.zeros(np.shape(a["logits"]), bool)
        for row, ids in enumerate(a["keep_ids"]):
            keep[row, [*ids, targets[row]]] = True

    @jax.jit
    def total(logits):
        out, _ = token_logprobs(logits, jnp.asarray(targets), p.get("temperature", 1.0), keep)
        return out.sum(), out

    (_, out), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(a["logits"]))
    return {"logp": out, "grad_logits": grad}


def top_p(a: Arrays, p: Params) -> Outputs:
    scaled = jnp.asarray(a["logits"]) / p.get("temperature", 1.0)
    rows = scaled.shape[0]
    limit = jnp.full(rows, p.get("top_p", 1.0), scaled.dtype)
    kept = allowed_tokens(scaled, limit, jnp.full(rows, p.get("top_k") or 0))
    logprobs = jax.nn.log_softmax(jnp.where(kept, scaled, -jnp.inf))
    return {
        "kept": [np.flatnonzero(row).tolist() for row in np.asarray(kept)],
        "logp": [np.asarray(row)[own].tolist() for row, own in zip(logprobs, np.asarray(kept))],
    }


def kl_reward(a: Arrays, p: Params) -> Outputs:
    options = {"coef": p["beta"], **chosen(p, kind="kind")}
    penalty = kl.kl_token_rewards(a["old_logp"], a["ref_logp"], a["mask"], **options)
    options["coef"] = -1.0
    divergence = kl.kl_token_rewards(a["old_logp"], a["ref_logp"], a["mask"], **options)
    score = token.on_last_token(a["rewards"], a["mask"])
    return {"token_rewards": penalty + score, "seq_kl": divergence.sum(axis=1)}


def kl_controller(a: Arrays, p: Params) -> Outputs:
    coef, out = p["init"], []
    for value in np.asarray(a["kls"], float).tolist():
        coef = kl.next_kl_coef(
            coef, value, target=p["target"], num_samples=p["n_steps"], horizon=p["horizon"]
        )
        out.append(coef)
    return {"coef": out}


def overlong(a: Arrays, p: Params) -> Outputs:
    penalty = shaping.overlong_penalty(
        a["lengths"], max_length=p["max_len"], buffer=p["buffer"], factor=p.get("factor", 1.0)
    )
    return {"penalty": penalty, "rewards": np.asarray(a["rewards"]) + penalty}


def overlong_filter(a: Arrays, p: Params) -> Outputs:
    ends = [Outcome.TRUNCATED if cut else Outcome.OK for cut in np.asarray(a["truncated"]) != 0]
    trains = [trains_scored(fake_trajectory(outcome=end), overlong_filter=True) for end in ends]
    return {"mask": np.where(np.array(trains)[:, None], a["mask"], 0)}


def alpha_filter(a: Arrays, p: Params) -> Outputs:
    fresh = {
        t["id"]: staleness.is_fresh(p["train_version"], t["start_version"], p["alpha"])
        for t in a["trajectories"]
    }
    done = {t["id"] for t in a["trajectories"] if t["done"]}
    return {
        "keep": [uid for uid, ok in fresh.items() if ok],
        "drop_or_abort": [uid for uid, ok in fresh.items() if not ok],
        "trainable": [uid for uid, ok in fresh.items() if ok and uid in done],
        "buffer_limit": staleness.buffer_limit(p["alpha"], p["batch"]),
    }


def eta_capacity(a: Arrays, p: Params) -> Outputs:
    """As the scheduler: what the bound admits, and no more than there are slots."""

    def capacity(version: int, accepted: int, running: int) -> int:
        num_open = accepted + running - version * p["batch"]
        bound = staleness.admissible(num_open, p["eta"], p["batch"])
        return min(bound, p["max_concurrent"] - running)

    return {
        "capacity": [capacity(s["version"], s["accepted"], s["running"]) for s in a["states"]],
        "queue_limit": staleness.buffer_limit(p["eta"], p["batch"]),
    }


def eta_check(a: Arrays, p: Params) -> Outputs:
    """Whether the n-th may have started: those before it left room."""
    pairs = zip(np.asarray(a["n_generated"], int).tolist(), np.asarray(a["version"], int).tolist())
    before = [n - 1 - v * p["batch"] for n, v in pairs]
    return {"ok": [staleness.admissible(num, p["eta"], p["batch"]) > 0 for num in before]}


def prox_loglinear(a: Arrays, p: Params) -> Outputs:
    versions = np.asarray(a["versions"], int)
    lag = np.where(versions < 0, 0, p["train_version"] - versions)
    proximal, alpha = correction.loglinear_proximal(
        jnp.asarray(a["logp"]), jnp.asarray(a["behav_logp"]), jnp.asarray(lag)
    )
    return {"alpha": alpha, "prox_logp": proximal}


def version_mix(a: Arrays, p: Params) -> Outputs:
    version, limit = p["train_version"], p["max_age"]
    mask = np.asarray(a["mask"]) != 0
    ages = np.where(mask, staleness.token_ages(a["versions"], version), 0)
    own = [row[here] for row, here in zip(ages, mask)]
    mix = staleness.version_mix(own)
    return {
        "token_age": ages,
        "oldest_age": mix["oldest"],
        "newest_age": mix["newest"],
        "mean_age": [row.mean() if len(row) else 0.0 for row in own],
        "n_versions": mix["num_versions"],
        "keep_by_start": mix["start_age"] <= limit,
        "token_keep": mask & (ages <= limit),
    }


HOST: dict[str, HostOp] = {
    "adv.gae": HostOp(gae),
    "adv.gdpo": HostOp(gdpo),
    "adv.gigpo": HostOp(gigpo, rows="rows"),
    "adv.graph_credit": HostOp(
        lambda a, p: {"node_advantages": agents.graph_credit(a["paths"], a["values"], **p)},
        rows="fixed",
    ),
    "adv.grpo": by_group(group.group_normalised, "eps", "ddof", "std_scope"),
    "adv.grpo_passk": by_group(group.best_of_group, "normalize"),
    "adv.maxrl": by_group(group.max_likelihood),
    "adv.opo": HostOp(opo),
    "adv.otb": HostOp(otb),
    "adv.process_grpo": HostOp(process_grpo),
    "adv.reinforce_pp": HostOp(reinforce_pp),
    "adv.reinforce_pp_baseline": HostOp(reinforce_pp_baseline),
    "adv.remax": HostOp(
        lambda a, p: on_tokens(group.above_greedy(a["rewards"], a["greedy_rewards"]), a["mask"])
    ),
    "adv.rloo": by_group(group.leave_one_out, "normalize", "eps"),
    "adv.role_ema": HostOp(role_ema, rows="fixed"),
    "adv.role_groups": HostOp(role_groups, rows="rows"),
    "adv.turn_returns": HostOp(turn_returns),
    "adv.whiten": HostOp(whiten),
    "adv.whiten_dp": HostOp(whiten_dp, rows="fixed"),
    "agg.microbatch": HostOp(microbatches, rows="fixed"),
    "curriculum.dump": HostOp(dump, rows="fixed"),
    "curriculum.spo": HostOp(spo, rows="fixed"),
    "filter.difficulty": HostOp(difficulty, rows="rows"),
    "filter.dynamic_sampling": HostOp(dynamic_sampling, rows="rows"),
    "filter.overlong": HostOp(overlong_filter),
    "loss.distill_full": HostOp(distill_full, selects=False),
    "loss.dpo": HostOp(
        dpo,
        rows="rows",
        own_mask={
            "chosen": "mask_chosen",
            "ref_chosen": "mask_chosen",
            "rejected": "mask_rejected",
            "ref_rejected": "mask_rejected",
        },
    ),
    "loss.entropy_adaptive": HostOp(entropy_adaptive, rows="fixed"),
    "mask.m2po": HostOp(m2po),
    "mismatch.metrics": HostOp(measures),
    "moe.replay": HostOp(replay, rows="rows"),
    "num.logprob": HostOp(logprob, rows="rows"),
    "num.top_p": HostOp(top_p, rows="fixed"),
    "reward.kl": HostOp(kl_reward),
    "reward.kl_controller": HostOp(kl_controller, rows="fixed"),
    "reward.overlong": HostOp(overlong, rows="rows"),
    "stale.alpha_filter": HostOp(alpha_filter, rows="fixed"),
    "stale.eta_capacity": HostOp(eta_capacity, rows="fixed"),
    "stale.eta_check": HostOp(eta_check, rows="fixed"),
    "stale.prox_loglinear": HostOp(prox_loglinear, rows="rows"),
    "stale.version_mix": HostOp(version_mix),
}
