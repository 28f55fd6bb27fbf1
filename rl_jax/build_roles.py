"""The critic, the reference, the teacher and the reward model of a job: made only where its algorithm needs them.

A role that nothing needs costs nothing: no weights, no mesh of its own, no program. What a role starts from never
changes under a run: the critic starts from the policy's trunk and is then a part of every checkpoint; a role given by
its path is pinned in <run>/roles.json, so that a resume scores with the same bytes though that run went on; a reference
without a path is the policy that RL starts from, kept in <run>/reference/checkpoints/step_0 and never written again.
Life: 1 `make_roles` before any weights. 2 The policy gets its weights (job.py: of a checkpoint, or fresh and warm).
3 `open_roles` keeps or finds what the others start from, and loads it.
Must not: decide what an algorithm needs (options.py), or check a path that config.parse could check.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from rl_jax.algorithms.options import IN_STEP, entry_of, learns_from_rows
from rl_jax.checkpoint import Checkpointer, CheckpointError
from rl_jax.disk import naming
from rl_jax.learner.batch import Batch
from rl_jax.learner.critic import Critic
from rl_jax.learner.learner import Learner
from rl_jax.learner.reward_model import RewardModel
from rl_jax.learner.roles import Roles
from rl_jax.learner.rows import Rows
from rl_jax.learner.scorer import FrozenPolicy, Scorer
from rl_jax.lowering import Program, tracing
from rl_jax.mesh import Meshes, MeshPlan
from rl_jax.models import MODELS, hf
from rl_jax.models.hf_files import weights_digest
from rl_jax.models.value import value_model
from rl_jax.resume import step_of
from rl_jax.role_source import GIVEN, NEEDED_ROLE, REWARD_MODEL, RoleSource, find_source
from rl_jax.settings import ModelSettings, Settings

TRAINING = ("train", "train_only")  # modes in which a role computes anything
REFERENCE, PINS = "reference", "roles.json"


@dataclass(frozen=True)
class Setting:
    """What the roles see of a job."""

    settings: Settings
    plan: MeshPlan
    meshes: Meshes
    run: Path  # the run directory
    resolve: Callable[[str, Mapping[str, Any]], Any]
    note: Callable[[str], None]
    mode: str
    is_reader: bool = False  # nothing is written into `run`

    @property
    def dump_dir(self) -> Path | None:
        """Where batches go whose update is not finite."""
        return None if self.is_reader else self.run / "quarantine"

    @property
    def reads(self) -> bool:
        """Whether it trains on rows of data, and samples nothing."""
        settings = self.settings
        return self.mode == "train" and learns_from_rows(settings.algorithm, settings.data)

    @property
    def collects(self) -> bool:
        """Whether it samples batches of episodes."""
        return self.mode == "rollout_only" or (self.mode == "train" and not self.reads)

    @property
    def warms_up(self) -> bool:
        """Whether a fresh run begins with supervised steps on scripted episodes."""
        return self.collects and self.settings.warm_start.steps > 0

    @property
    def max_rows(self) -> int:
        """Most packed rows of a step's batch: one a trajectory."""
        s = self.settings
        if self.reads:
            return s.data.batch_rows * (1 if entry_of(s.algorithm).rows == "chat" else 2)
        return s.rollout.batch_groups * s.rollout.group_size

    @property
    def temperature(self) -> float:
        """At which log-probs are taken."""
        # 0 is legal in --mode=eval, and not read
        return 1.0 if self.reads else self.settings.rollout.temperature or 1.0

    def owns(self, source: Path | None) -> bool:
        """Whether the run goes on from its own checkpoint."""
        return source is not None and source.parent.parent.absolute() == self.run.absolute()


def make_roles(job: Setting, policy: Learner | RewardModel) -> Roles:
    """The policy, and its critic where the algorithm needs one; without weights."""
    if job.mode not in TRAINING or "values" not in policy.algorithm.needs:
        return Roles(policy)
    settings, c = job.settings, job.settings.critic
    build = job.resolve(settings.model.family, MODELS)
    critic = Critic(
        value_model(build, settings.model, policy.model.vocab_size),
        job.meshes.roles[c.pool],
        job.plan.role(c.pool, settings.model).rules,
        replace(
            settings.learner,
            learning_rate=c.learning_rate,
            schedule=c.schedule,
            warmup_steps=c.warmup_steps,
            weight_decay=c.weight_decay,
            grad_clip=c.grad_clip,
        ),
        value_clip=c.value_clip,
        updates=c.updates,
        max_rows=job.max_rows,
        total_steps=settings.steps * c.updates or c.warmup_steps + 1,
        dump_dir=job.dump_dir,
    )
    return Roles(policy, critic, c.head_start)


def open_roles(job: Setting, roles: Roles, source: Path | None) -> None:
    """Everything but the policy gets its weights. source: the checkpoint the run goes on from; None = a fresh start.

    Raises: CheckpointError where what a role started from is gone or changed.
    """
    needed = _needed(roles.policy.algorithm.needs)
    keeps = REFERENCE in needed and not job.settings.reference.checkpoint and job.mode != "eval"
    if keeps:
        _keep_reference(job, roles.policy, source)
    if job.mode not in TRAINING:
        return
    if roles.critic is not None and not roles.critic.has_weights:
        roles.critic.start(roles.policy.params)
        job.note("critic: starts from the policy's trunk, its values from 0")
    for where in (REFERENCE, *GIVEN):
        if where not in needed:
            continue
        if where == REFERENCE and keeps:
            kept = job.run / REFERENCE / "checkpoints" / "step_0"
            found = RoleSource(kept, job.settings.model)
        else:
            found = _pinned(job, where, is_resumed=job.owns(source))
        role = _frozen(job, roles.policy, where, found)
        for need in needed[where]:
            if need in IN_STEP:
                roles.policy.learn_from(role.scorer.forward, role.params)
            else:
                roles.frozen[need] = role


def lower_frozen(job: Setting, policy: Learner, batch: Batch) -> Iterator[Program]:
    """The program of each role that scores and is not trained, from shapes alone, whatever checkpoint it will have.

    A role that the policy's own step runs has no program: the policy is told its shapes.

    Raises: LoweringError.
    """
    needed = _needed(policy.algorithm.needs)
    for where in (REFERENCE, *GIVEN):
        if where not in needed:
            continue
        path, model = getattr(job.settings, where).checkpoint, job.settings.model
        with tracing(where):
            scorer = _scorer(
                job, policy, where, find_source(where, path, model).model if path else model
            )
        for need in needed[where]:
            if need in IN_STEP:
                policy.learn_from(scorer.forward, scorer.rows.abstract_cast())
            else:
                yield scorer.lower(need, scorer.rows.abstract_cast(), batch)


def _needed(needs: Iterable[str]) -> dict[str, list[str]]:
    """Section of a role -> what of an algorithm's needs it computes."""
    out: dict[str, list[str]] = {}
    for need in sorted(needs):
        out.setdefault(NEEDED_ROLE[need], []).append(need)
    return out


def _scorer(job: Setting, policy: Learner, where: str, settings: ModelSettings) -> Scorer:
    """Of a role's model on its mesh: the learner's own program where model and mesh are the learner's."""
    pool, same_model = getattr(job.settings, where).pool, settings == job.settings.model
    is_reward = where == REWARD_MODEL
    if not pool and same_model and not is_reward:
        return policy.scorer
    build, size = (
        job.resolve(settings.family, MODELS),
        settings.vocab_size or policy.model.vocab_size,
    )
    if is_reward:
        model = value_model(build, settings, size)
    else:
        model = policy.model if same_model else build(settings, size)
    rules, mesh = job.plan.role(pool, settings).rules, job.meshes.roles[pool]
    rows = Rows(model, mesh, rules, job.settings.learner, max_rows=job.max_rows)
    return Scorer(rows, rows.values(lookback=0) if is_reward else rows.log_probs(job.temperature))


def _frozen(job: Setting, policy: Learner, where: str, source: RoleSource) -> FrozenPolicy:
    """The role's weights on its mesh."""
    settings, pool = job.settings, getattr(job.settings, where).pool
    scorer = _scorer(job, policy, where, source.model)
    rows = scorer.rows
    if source.is_pretrained:
        params = hf.load(source.checkpoint, rows.model, rows.param_shardings)
    else:
        weights = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows.param_shardings[name])
            for name, a in rows.model.abstract.items()
        }
        reader = Checkpointer(source.checkpoint.parent.parent, settings.checkpoint)
        tree, _ = reader.restore(step_of(source.checkpoint), {"params": weights}, subset=True)
        params = tree["params"]
    on = f"pool {pool}" if pool else "the train mesh"
    job.note(f"{where}: weights of {source.checkpoint}, on {on}")
    return FrozenPolicy(scorer, params)


def _keep_reference(job: Setting, policy: Learner, source: Path | None) -> None:
    """Into <run>/reference: what RL starts from. A fork of, or a replay from, a run that has one takes that one."""
    home = job.run / REFERENCE
    if job.owns(source):
        if not home.is_dir():
            raise CheckpointError(
                f"{home} is gone: it held the policy that this run's reference is; put it back, or start another run"
                " with reference.checkpoint set"
            )
        return
    if source is not None and (theirs := source.parent.parent / REFERENCE).is_dir():
        shutil.rmtree(
            home, ignore_errors=True
        )  # of an attempt that ended before its first checkpoint
        shutil.copytree(theirs, home)
        job.note(f"reference: that of {source.parent.parent}")
        return
    keeper = Checkpointer(home, job.settings.checkpoint)
    keeper.save(0, {"params": policy.params}, {"from": str(source or "the start of this run")})
    keeper.wait()


def _pinned(job: Setting, where: str, is_resumed: bool) -> RoleSource:
    """The checkpoint of a role given by its path: looked for once, then what roles.json says."""
    pins_path = job.run / PINS
    pins = json.loads(pins_path.read_text(encoding="utf-8")) if pins_path.exists() else {}
    path, settings = getattr(job.settings, where).checkpoint, job.settings
    pin = pins.get(where) if is_resumed else None
    try:
        source = find_source(where, pin["checkpoint"] if pin else path, settings.model)
        checkpoint = source.checkpoint.absolute()
        if source.is_pretrained:
            digest = weights_digest(checkpoint)
        else:
            reader = Checkpointer(checkpoint.parent.parent, settings.checkpoint)
            digest = reader.manifest(step_of(checkpoint))["sha256"]
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{where} of this run cannot be read: {error}") from error
    if pin and digest != pin["sha256"]:
        raise CheckpointError(
            f"{where}: {checkpoint} is not the checkpoint that this run began with; put that one back, or start"
            " another run"
        )
    if not pin:
        pins[where] = {"checkpoint": str(checkpoint), "sha256": digest}
        temporary = pins_path.with_suffix(".tmp")
        with naming(pins_path):
            temporary.write_text(json.dumps(pins, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, pins_path)
    return replace(source, checkpoint=checkpoint)
