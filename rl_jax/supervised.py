"""What a supervised run (sft, rm, dpo on rows) is made of: its rows, how many steps they are, what learns from them.

Rows come from data.path, read and checked before the run directory is made, or, for sft without a path, from the task
sources' scripts, played through the path of sampled episodes (script_episodes and script_skill say how many and how
well) once there is a directory for their workers' logs. Both are the same after a restart, which ExampleStream checks.
It trains in the driver's process, whatever cluster.learner_processes says (config refuses it): there are no servers
that a loss would idle, the driver has nothing else to do meanwhile, and what those processes speak (remote/learner.py)
has no order for held-out rows, for a reward model in the policy's place, or for the reference's log-probs of all rows.
Must not: decide the order of a step (driver.py), or check what config.parse could.
"""

from dataclasses import replace
from typing import Any

from rl_jax.algorithms.options import entry_of
from rl_jax.build_roles import Setting
from rl_jax.config import ConfigError
from rl_jax.data.corpus import Corpus, batches, num_held_out, played_corpus, read_corpus
from rl_jax.data.examples import ExampleRules
from rl_jax.data.stream import num_steps
from rl_jax.learner.batch import pack
from rl_jax.learner.learner import Learner
from rl_jax.learner.reward_model import RewardModel
from rl_jax.learner.roles import Roles
from rl_jax.learner.scorer import FrozenPolicy, Remembered
from rl_jax.models import MODELS
from rl_jax.models.model import Model
from rl_jax.models.value import value_model
from rl_jax.rollout.blocking import run_blocking
from rl_jax.rollout.episode import EpisodeRules
from rl_jax.rollout.scripted import ScriptPlan, scripted_trajectories
from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import Settings
from rl_jax.start import make_learner
from rl_jax.tokens import Renderer
from rl_jax.types import Group

NEED = "reference_logprobs"


def read_rows(settings: Settings, renderer: Renderer) -> Corpus | None:
    """The corpus of data.path; None where there is no path. Raises DataError."""
    if not settings.data.path:
        return None
    rules = ExampleRules(
        entry_of(settings.algorithm).rows, settings.data.train_on, settings.learner.row_tokens
    )
    return read_corpus(settings.data, renderer, rules, settings.seed)


def with_steps(settings: Settings, corpus: Corpus | None) -> Settings:
    """The settings with `steps` for data.epochs passes; unchanged at 0. Raises ConfigError, DataError."""
    if not settings.data.epochs:
        return settings
    if corpus is not None:
        num_rows = len(corpus.train)
    else:
        num_rows = sum(source.script_episodes for source in settings.tasks.sources)
        num_rows -= num_held_out(num_rows, settings.data.eval_share)
    steps, warmup = num_steps(num_rows, settings.data), settings.learner.warmup_steps
    if warmup >= steps:
        raise ConfigError(
            [
                f"learner.warmup_steps={warmup} leaves nothing of the {steps} steps of data.epochs="
                f"{settings.data.epochs} passes over {num_rows} rows; lower it, or train longer"
            ]
        )
    return replace(settings, steps=steps)


def play_rows(settings: Settings, pool: EnvPool, renderer: Renderer) -> Corpus:
    """The corpus of the task sources' scripts; ends the pool. Raises ScriptError, EnvError, DataError."""
    rules = EpisodeRules.of(
        settings.rollout,
        settings.engine.context,
        settings.serve.turn_deadline_s,
        settings.learner.row_tokens,
    )

    async def play() -> list[Group]:
        groups: list[Group] = []
        try:
            await pool.start()
            for source in filter(lambda source: source.script_episodes, settings.tasks.sources):
                plan = ScriptPlan(source.script_episodes, source.script_skill, settings.seed)
                tasks = pool.list_tasks(source.tag, "train")
                groups += await scripted_trajectories(pool, tasks, renderer, rules, plan)
        finally:
            await pool.close()
        return groups

    return played_corpus(run_blocking(play()), settings.data.eval_share, settings.seed)


def make_trained(job: Setting, model: Model, algorithm: Any) -> Learner | RewardModel:
    """What learns from the rows, without weights: the policy, or a reward model of its settings."""
    settings, train = job.settings, job.plan.train
    if entry_of(settings.algorithm).rows != "ends":
        return make_learner(job, model, algorithm)
    assert train is not None, "config.parse refuses a plan without a train mesh"
    return RewardModel(
        value_model(job.resolve(settings.model.family, MODELS), settings.model, model.vocab_size),
        job.meshes.train,
        train.rules,
        algorithm,
        settings.learner,
        max_rows=job.max_rows,
        total_steps=settings.steps or settings.learner.warmup_steps + 1,
        dump_dir=job.dump_dir,
    )


def remember_reference(roles: Roles, corpus: Corpus, settings: Settings) -> None:
    """Score every row once with the reference policy, if there is one, and let its weights go."""
    role = roles.frozen.get(NEED)
    if not isinstance(role, FrozenPolicy):
        return
    remembered = Remembered(role)
    for rows in (corpus.train, corpus.held_out):
        for groups in batches(rows, settings.data.batch_rows):
            remembered.score(pack(groups, settings.learner, roles.balance))
    remembered.close()
    roles.frozen[NEED] = remembered
