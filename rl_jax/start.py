"""Where the weights of a run come from: fresh, a model's source, its own checkpoint, another run's, or the start of a
replay.

Owns: what of a checkpoint is taken. A run goes on from its own with everything in it; so does, in a new directory, a
fork of one run on episodes from another. Where either trains on rows (RL from sft, rm from sft, sft from sft), where
the other is a replay, which has no place in a task stream, or has other tags, a fork takes the weights, with a fresh
optimizer, from version 0, and no warm start.
Must not: start anything, or write.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from rl_jax.algorithms import ALGORITHMS
from rl_jax.build_roles import Setting
from rl_jax.checkpoint import Checkpointer, CheckpointError
from rl_jax.driver import DriverState
from rl_jax.learner.learner import Learner
from rl_jax.learner.roles import Roles
from rl_jax.models import hf
from rl_jax.models.model import Model
from rl_jax.models.value import HEAD, ValueModel
from rl_jax.resume import CONFIG, Decision, checkpoint_steps, step_of, stored_config
from rl_jax.rollout.bound import ADAPTIVE, Bound, Limits
from rl_jax.rollout.traces import read_groups
from rl_jax.settings import AlgorithmSettings, RolloutSettings, Settings
from rl_jax.types import Group


def make_learner(job: Setting, model: Model, algorithm: Any, **changes: Any) -> Learner:
    """The learner of the plan's train mesh, without weights. changes: of LearnerSettings."""
    settings = job.settings
    assert job.plan.train is not None, "config.parse refuses a plan without a train mesh"
    # At 0 steps nothing reads the schedule.
    waits = settings.critic.head_start if "values" in algorithm.needs else 0
    own_steps = settings.steps - waits if settings.steps else settings.learner.warmup_steps + 1
    total_steps = changes.pop("total_steps", own_steps)
    most_rows = changes.pop("max_rows", job.max_rows)
    return Learner(
        model,
        job.meshes.train,
        job.plan.train.rules,
        algorithm,
        replace(settings.learner, **changes),
        max_rows=most_rows,
        temperature=job.temperature,
        total_steps=total_steps,
        dump_dir=job.dump_dir,
    )


def make_warm_learner(job: Setting, model: Model) -> Learner:
    """Of the warm start: supervised, with rates and a length of its own; without weights."""
    cfg = job.settings.warm_start
    sft = job.resolve("sft", ALGORITHMS)(AlgorithmSettings(name="sft"))
    return make_learner(
        job, model, sft,
        total_steps=cfg.steps, max_rows=cfg.batch_episodes, **warm_settings(job.settings),
    )  # fmt: skip


def warm_settings(settings: Settings) -> dict[str, Any]:
    """What a warm start changes of LearnerSettings."""
    cfg = settings.warm_start
    return {
        "learning_rate": cfg.learning_rate,
        "schedule": "cosine",
        "warmup_steps": min(5, cfg.steps - 1),
    }


def starting_point(
    job: Setting, decision: Decision, checkpointer: Checkpointer, roles: Roles
) -> tuple[DriverState, dict[str, Any], Path | None]:
    """Weights into the policy; the driver's state, the checkpoint's extra and its path ({}, None for a fresh start)."""
    source, mode, reads = decision.resume_from, job.mode, job.reads
    if source is None and mode == "train_only":
        source = _replay_start(job.settings)
    if source is None:
        _begin(job, roles)
        return DriverState(), {}, None
    is_own = job.owns(source)
    if is_own:
        source = verified(job, decision, checkpointer).resume_from
        assert source is not None, "verified keeps it"
    reader = Checkpointer(source.parent.parent, job.settings.checkpoint)
    step = step_of(source)
    has_critic = reader.holds(step, "critic/")
    saved = reader.manifest(step)["extra"]
    theirs = saved.get("supervised", "")
    is_replay = mode == "train" and not reads and "stream" not in saved
    is_elsewhere = mode != "train_only" and not reads and _has_other_tags(saved, job.settings)
    if not is_own and (reads or theirs or is_replay or is_elsewhere):
        _take_weights(roles, reader, step, theirs)
        job.note(f"weights of {source}; fresh optimizer, version 0, no warm start")
        return DriverState(), {}, None
    state, extra = reader.restore(step, roles.abstract_state(has_critic), subset=True)
    if is_own and mode == "train" and ("rows" if reads else "stream") not in extra:
        raise CheckpointError(
            f"{source} was saved by another mode and holds no position in the data; train from its weights in another"
            f" --run_dir with --resume={source}"
        )
    roles.load(state)
    driver_state = DriverState(
        version=extra["version"],
        weights_version=extra.get("weights_version") if mode == "rollout_only" else None,
        algorithm=extra["algorithm"],
        evaluations=extra["evaluations"] if bool(theirs) == reads else {},
        evaluated=extra["evaluated"],
        bound=_bound(extra, job.settings.rollout) if mode == "train" else None,
        steered=extra.get("steered", {}) if is_own else {},
    )
    job.note(f"resumed from {source}: version {driver_state.version}")
    for change in decision.changes:
        job.note(f"changed since: {change}")
    return driver_state, extra, source


def verified(job: Setting, decision: Decision, checkpointer: Checkpointer) -> Decision:
    """The decision with the newest checkpoint that verifies, where it is the run's own and none was asked for by name.

    Raises: CheckpointError where none does.
    """
    if decision.is_exact or not job.owns(decision.resume_from):
        return decision
    newest = checkpointer.latest()  # what does not verify is set aside, loudly
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {checkpointer.directory} verifies; start anew in another --run_dir"
        )
    return replace(decision, resume_from=checkpointer.directory / f"step_{newest}", is_exact=True)


def _bound(extra: Mapping[str, Any], settings: RolloutSettings) -> Bound | None:
    """Under rollout.staleness_policy=adaptive, where the saved run had it too."""
    if settings.staleness_policy != ADAPTIVE or extra.get("bound") is None:
        return None
    return Bound.from_tree(extra["bound"], Limits(settings.max_staleness))


def reads_source(settings: Settings, mode: str, decision: Decision) -> bool:
    """Whether a run that begins so takes its weights from model.source. Raises: CheckpointError, as starting_point."""
    if not settings.model.source or decision.resume_from is not None:
        return False
    return mode != "train_only" or _replay_start(settings) is None


def _has_other_tags(saved: Mapping[str, Any], settings: Settings) -> bool:
    """Whether a checkpoint's place in its task stream names other tags, or another order of them, than the config."""
    if "stream" not in saved:
        return False
    theirs = [entry["tag"] for entry in saved["stream"]["tags"]]
    return theirs != [source.tag for source in settings.tasks.sources]


def _begin(job: Setting, roles: Roles) -> None:
    """Fresh weights, or those of model.source. Raises: WeightsError."""
    policy: Any = roles.policy
    directory = job.settings.model.source
    if not directory:
        policy.init(jax.random.key(job.settings.seed))
        return
    job.note(f"weights of {directory}")
    model = policy.rows.model
    trunk = model.trunk if isinstance(model, ValueModel) else model
    skips = isinstance(model, ValueModel)  # a head over the vocabulary has no place in it
    policy.start(hf.load(directory, trunk, policy.rows.param_shardings, skips_head=skips))


def _take_weights(roles: Roles, reader: Checkpointer, step: int, theirs: str) -> None:
    """The weights alone of another run's checkpoint, whose supervised algorithm is `theirs` ("" = it trained on
    episodes). Raises: CheckpointError for a reward model where a policy is to start."""
    model: Any = roles.policy
    weights = dict(model.abstract_state().params)
    takes_rewards = any(name in weights for name in HEAD)
    has_rewards = reader.holds(step, f"params/{HEAD[0]}")
    if has_rewards and not takes_rewards:
        raise CheckpointError(
            f"step_{step} in {reader.directory} is a reward model (algorithm {theirs}), which says nothing; start from"
            " a policy's checkpoint"
        )
    if takes_rewards and not has_rewards:
        weights = {name: a for name, a in weights.items() if name not in HEAD}
    tree, _ = reader.restore(step, {"params": weights}, subset=True)
    begin = model.reset if has_rewards else model.start
    begin(tree["params"])


def saved_batches(settings: Settings, after: int) -> Iterator[tuple[int, list[Group]]]:
    """(step, groups) of rollout.replay_dir, ascending, at most `steps` of them, without those up to step `after`, which
    the weights have seen. Raises FileNotFoundError if the directory has none at all."""
    root = Path(settings.rollout.replay_dir) / "rollouts"
    for step in saved_steps(settings)[: settings.steps]:
        if step > after:
            yield step, read_groups(root / f"step_{step}" / "train")


def saved_steps(settings: Settings) -> list[int]:
    """Of rollout.replay_dir, ascending. Raises FileNotFoundError if there is none."""
    root = Path(settings.rollout.replay_dir) / "rollouts"
    steps = sorted(int(p.parent.name.removeprefix("step_")) for p in root.glob("step_*/train"))
    if not steps:
        raise FileNotFoundError(
            f"rollout.replay_dir={settings.rollout.replay_dir} has no rollouts/step_N/train; give the directory of a"
            " run whose metrics.rollouts_every is above 0"
        )
    return steps


def _replay_start(settings: Settings) -> Path | None:
    """The checkpoint that the first saved batch was sampled from; None where that was what this seed makes.

    Raises CheckpointError: the run did not keep it.
    """
    first = saved_steps(settings)[0]
    run = Path(settings.rollout.replay_dir)
    path = run / "checkpoints" / f"step_{first - 1}"
    if not path.is_dir():
        if first == 1 and _began_alike(run, settings):
            return None
        raise CheckpointError(
            f"rollout.replay_dir={run}: its first saved batch, of step {first}, was sampled by version {first - 1}, and"
            f" checkpoints/step_{first - 1} is not there (it has {checkpoint_steps(run) or 'none'}); collect with"
            " --mode=rollout_only, which keeps it, or name a copy of that checkpoint with --resume=PATH"
        )
    return path


def _began_alike(run: Path, settings: Settings) -> bool:
    """Whether version 0 of a run was what these settings begin with: no warm start."""
    theirs = stored_config(run) if (run / CONFIG).is_file() else {}
    if theirs.get("warm_start", {}).get("steps") != 0:
        return False
    source = theirs.get("model", {}).get("source", "")
    is_same = source == settings.model.source
    return is_same if source else is_same and theirs.get("seed") == settings.seed
