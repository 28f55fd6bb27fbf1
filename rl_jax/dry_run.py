"""--dry_run: everything that can be found out about a run without doing any of it.

Life: 1 What the run will hold and move is printed (plan_record.py). 2 An episode of each task source goes through the
tokenizer and back, and the longest first prompts are counted (preflight.py). 3 Every program that a step or a server
runs is lowered from shapes alone, on simulated CPU devices, as many as the plan needs: kernels that are chosen by
platform are not part of that. 4 plan.json is written, if a --run_dir was named that holds no run.
What does not pass is one line of a ConfigError.
Must not: allocate weights, compile or start a server.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from rl_jax.algorithms.plugin import make_algorithm
from rl_jax.build_roles import TRAINING, Setting, lower_frozen, make_roles
from rl_jax.cluster import InProcCluster
from rl_jax.config import ConfigError
from rl_jax.console import say
from rl_jax.learner.batch import empty_batch
from rl_jax.learner.learner import Learner
from rl_jax.lowering import LoweringError, Program, tracing
from rl_jax.models.model import Model
from rl_jax.plan_record import plan_lines
from rl_jax.preflight import Played, check_prompts, play
from rl_jax.preflight_model import history_notes
from rl_jax.progress import Progress
from rl_jax.resume import CONFIG, PLAN, encode
from rl_jax.rollout.worker import EnvPool
from rl_jax.start import make_warm_learner
from rl_jax.supervised import make_trained
from rl_jax.tokens import Renderer


def dry_run(
    setting: Setting,
    model: Model,
    record: dict[str, Any],
    renderer: Renderer,
    pool: EnvPool | None,
    progress: Progress,
) -> None:
    """Print the record, then what else is found out; ends the pool. Raises: ConfigError."""
    settings = setting.settings
    say(setting.plan.describe())
    for line in plan_lines(record, setting):
        say(line)
    if pool is not None:
        played = play(settings, pool, renderer)
        for line in played_lines(played, settings.engine.context):
            say(line)
        check_prompts(settings, {tag: one.prompts for tag, one in played.items()})
        # A script that ends with its first turn has no history.
        several = {tag: one for tag, one in played.items() if one.trip.num_turns != 1}
        openings = {tag: one.opening for tag, one in several.items()}
        rewritten = {tag: one.trip.is_rewritten for tag, one in several.items()}
        for line in history_notes(settings, openings, renderer, rewritten):
            say(line)
        record["round_trips"] = {tag: asdict(one.trip) for tag, one in played.items()}
        record["prompts"] = {tag: [asdict(p) for p in one.prompts] for tag, one in played.items()}
    record["programs"] = []
    doing = ["building them"]
    with progress.phase("programs", "tracing them, from shapes alone", lambda: doing[-1]):
        try:
            for name, _ in programs(setting, model):
                doing.append(f"after {name}")
                record["programs"].append(name)
        except LoweringError as error:
            raise ConfigError([str(error)]) from error
    say(
        f"programs: {len(record['programs'])} can be traced for {setting.plan.num_devices} devices, here simulated on"
        f" the CPU (kernels chosen by platform are not part of that): {', '.join(record['programs'])}"
    )
    say("dry run: nothing wrong was found, and nothing was run; start it without --dry_run")


def write_plan(setting: Setting, record: Mapping[str, Any]) -> None:
    """plan.json into the named directory; a run that is there keeps the one of its own start."""
    if not (setting.run / CONFIG).exists():
        setting.run.mkdir(parents=True, exist_ok=True)
        (setting.run / PLAN).write_text(encode(record, indent=1) + "\n", encoding="utf-8")


def programs(setting: Setting, model: Model) -> Iterator[Program]:
    """Every program of the mode, lowered: of what learns, of what scores, of each distinct server.

    Raises: LoweringError naming the program.
    """
    # A kernel may not run on these devices; which one does is chosen by platform.
    plain = replace(setting.settings, learner=replace(setting.settings.learner, attention="plain"))
    setting = replace(setting, settings=plain)
    if setting.mode in TRAINING:
        yield from _learners(setting, model)
    if setting.warms_up:
        yield from _warm_start(setting, model)
    if setting.mode != "train_only" and not setting.reads:
        with tracing("the servers' programs"):
            cluster = InProcCluster(setting.plan, setting.meshes.servers, model, setting.settings)
        yield from cluster.lower()


def _warm_start(setting: Setting, model: Model) -> Iterator[Program]:
    with tracing("warm start's step"):
        warm = make_warm_learner(setting, model)
    for name, program in warm.lower(empty_batch(setting.settings.learner, ())):
        yield f"warm start's {name}", program


def _learners(setting: Setting, model: Model) -> Iterator[Program]:
    s = setting.settings
    with tracing(f"algorithm {s.algorithm.name}"):
        algorithm = make_algorithm(s.algorithm, setting.resolve)
    support = 0 if setting.reads else s.rollout.top_k
    with tracing("policy step"):
        policy = make_trained(setting, model, algorithm)
        told = algorithm.token_inputs((), (), dict.fromkeys(algorithm.needs, ()), None)
        batch = empty_batch(s.learner, {*algorithm.needs, *told}, support)
    with tracing("critic step"):
        roles = make_roles(setting, policy)
    frozen = list(lower_frozen(setting, policy, batch)) if isinstance(policy, Learner) else []
    yield from roles.lower(batch)
    yield from frozen


def played_lines(played: Mapping[str, Played], context: int) -> Iterator[str]:
    """What went through the tokenizer and came back as it was, and the longest first prompt of each split."""
    for tag, one in played.items():
        trip = one.trip
        yield (
            f"tag {tag}: {trip.what} keeps its text through the tokenizer: {trip.num_turns} turns, {trip.num_tokens}"
            f" tokens of engine.context={context}, {trip.num_sampled} of them sampled"
        )
        for p in one.prompts:
            yield (
                f"tag {tag}: longest first prompt of {p.num_counted} of {p.num_tasks} {p.split} tasks: {p.num_tokens}"
                f" tokens of {p.limit} ({p.task_id})"
            )
