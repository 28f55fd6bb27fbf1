"""What only the machine, the plugins and the environments can tell, checked before the run directory is made.

config.parse has read the config alone; here its names are loaded, its devices counted, its tokenizer's vocabulary laid
on the mesh, its environments asked what they offer and for a few first observations; in a dry run, an episode of each
is sent through the tokenizer.
Each finding is one line of a ConfigError.
Must not: write anything, or start what is not ended when the check returns.
"""

import asyncio
import json
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

from rl_jax.algorithms import ALGORITHMS, options
from rl_jax.algorithms.algorithm import LossInputs, RewardPartError, missing_members
from rl_jax.algorithms.contract import (
    AlgorithmRaised,
    ContractError,
    NotFinite,
    check_mapping,
    check_token_loss,
)
from rl_jax.algorithms.options import learns_from_rows
from rl_jax.algorithms.plugin import guarded
from rl_jax.config import ConfigError, filled
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.lowering import LoweringError, tracing
from rl_jax.mesh import MeshPlan
from rl_jax.models import MODELS
from rl_jax.models.model import Model
from rl_jax.rewards.check import ENV_SCORER, from_steps
from rl_jax.role_source import NEEDED_ROLE, find_source, role_errors, vocabulary_error
from rl_jax.rollout.blocking import run_blocking
from rl_jax.rollout.curriculum import ANY
from rl_jax.rollout.episode import Episode, EpisodeRules
from rl_jax.rollout.scheduler import SCHEDULERS, SchedulerConfig
from rl_jax.rollout.scheduler.demands import SchedulerError, tried
from rl_jax.rollout.scripted import ScriptError, ScriptPlan, scripted_episodes
from rl_jax.rollout.selection import selected
from rl_jax.rollout.worker import EnvError, EnvPool
from rl_jax.settings import ModelSettings, Settings, TaskSource
from rl_jax.testing.trajectories import fake_group
from rl_jax.tokens import Renderer, Tokenizer, encodable
from rl_jax.tokens.bridge import is_rewritten
from rl_jax.tokens.load import load_tokenizer, make_renderer
from rl_jax.tokens.renderer import Tools
from rl_jax.types import Message, StepResult, Task
from rl_jax.validate import algorithm_errors

NUM_PROMPTS, NUM_LONGEST = (
    64,
    16,
)  # of a split: first prompts counted all over it, and of the longest tasks

NUM_FIRST, FIRST_LOOK_S = 8, 1.0  # before a run: first prompts of a split, seconds for all splits

Resolve = Callable[[str, Mapping[str, Any]], Any]  # (name, literal table) -> the object


def present_devices(plan: MeshPlan, platform: str | None = None) -> list[Any]:
    """jax.devices(platform), if the plan fits them. Raises ConfigError."""
    try:
        devices = jax.devices(platform)
    except (
        RuntimeError
    ) as error:  # the boundary to JAX: the backend that was asked for is not there
        raise ConfigError([f"JAX finds no device: {error}; set mesh.platform=cpu"]) from None
    if plan.num_devices > len(devices):
        raise ConfigError(
            [
                f"mesh {plan.name} needs {plan.num_devices} devices but JAX finds {len(devices)}"
                f" ({devices[0].platform}); use a mesh that fits, such as --mesh=one_device, or simulate the devices"
                " on the CPU with --config.mesh.platform=cpu"
            ]
        )
    return devices


def load_plugin(
    settings: Settings, resolve: Resolve, chosen: Collection[str] | None = None
) -> Settings:
    """The settings as config.parse would have made them, had it known the algorithm: a plugin tells what it reads, and
    its own values, once it is loaded. chosen: as options.passed_over. Raises ConfigError."""
    resolve(settings.algorithm.name, ALGORITHMS)
    return filled(replace(settings, algorithm=options.passed_over(settings.algorithm, chosen)))


def load_names(
    settings: Settings, plan: MeshPlan, resolve: Resolve, mode: str = "train"
) -> Renderer:
    """The tokenizer's renderer, once every name of the config can be loaded and its vocabulary lies on the mesh.

    Raises ConfigError, here and not when the name is used: then there is a run directory, and servers run.
    """
    resolve(settings.model.family, MODELS)
    _try_scheduler(settings, resolve)
    algorithm = load_algorithm(settings, resolve)
    renderer = _load_renderer(settings, resolve)
    tokenizer = renderer.tokenizer
    errors = plan.check(
        settings.model, plan.num_devices, settings.learner, settings.engine, tokenizer.vocab_size
    )
    if mode != "eval":
        errors += _role_errors(settings, algorithm, tokenizer.vocab_size)
    if 0 < settings.model.vocab_size < tokenizer.vocab_size:
        errors.append(
            f"model.vocab_size={settings.model.vocab_size} is below the {tokenizer.vocab_size} tokens of"
            f" model.tokenizer={settings.model.tokenizer}; {vocabulary_remedy(settings.model)}"
        )
    if (num := len(renderer.stop_token_ids)) > settings.engine.num_stop_tokens:
        errors.append(
            f"model.tokenizer={settings.model.tokenizer} has {num} tokens that end a turn, above"
            f" engine.num_stop_tokens={settings.engine.num_stop_tokens}; raise it to {num}"
        )
    if errors:
        raise ConfigError(errors)
    return renderer


def _try_scheduler(settings: Settings, resolve: Resolve) -> None:
    """Ask the policy once, as at the first batch. Raises ConfigError."""
    r = settings.rollout
    tags = tuple(source.tag for source in settings.tasks.sources) or (ANY,)
    told = SchedulerConfig(tags, r.group_size, r.max_staleness, r.extra_groups, r.extra_members)
    try:
        tried(r.scheduler, resolve(r.scheduler, SCHEDULERS)(), told, r.batch_groups)
    except (SchedulerError, TypeError) as error:
        text = f"rollout.scheduler={r.scheduler}: {error}"
        raise ConfigError([str(error) if isinstance(error, SchedulerError) else text]) from error


def vocabulary_remedy(model: ModelSettings) -> str:
    """What to do where model.vocab_size is below the tokenizer's."""
    if not model.source:
        return "set it to 0 to take theirs"
    if model.tokenizer and Path(model.tokenizer).resolve() == Path(model.source).resolve():
        return "its config.json and its tokenizer.json are of different models: fetch the directory again"
    return f"take the tokenizer of {model.source}"


def _load_renderer(settings: Settings, resolve: Resolve) -> Renderer:
    try:
        tokenizer = load_tokenizer(settings.model.tokenizer, resolve)
        return make_renderer(tokenizer, settings.rollout.tool_parser, resolve)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([f"model.tokenizer={settings.model.tokenizer}: {error}"]) from error


def load_algorithm(settings: Settings, resolve: Resolve) -> Any:
    """The algorithm, built. Raises ConfigError for one that cannot be built from its settings, lacks a part of the
    protocol, or, of a plugin, does not read what was given, or whose loss cannot be traced."""
    name, given = f"algorithm.name={settings.algorithm.name}", settings.algorithm
    build = resolve(given.name, ALGORITHMS)
    is_plugin = given.name not in ALGORITHMS  # of which config.parse knew nothing
    if is_plugin and (errors := list(algorithm_errors(settings))):
        raise ConfigError(errors)
    try:
        algorithm = build(options.resolved(given))
    except Exception as error:  # the boundary to a plugin's code
        line = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            [
                f"{name} cannot be built of AlgorithmSettings: {type(error).__name__}: {line}; its constructor takes"
                " them alone"
            ]
        ) from error
    if lacks := missing_members(algorithm):
        raise ConfigError(
            [
                f"{name} has no {', '.join(lacks)}; derive it from rl_jax.algorithms.algorithm.Base, which has what few"
                " algorithms say, or from policy.PolicyAlgorithm"
            ]
        )
    guard = guarded(given.name, algorithm)
    if guard is not algorithm:
        _try_plugin(guard, settings)
    return guard


def _try_plugin(algorithm: Any, settings: Settings) -> None:
    """Its loss is traced from shapes alone, its host's part given episodes made of thin air. Raises ConfigError for
    what comes back and cannot be used; what the host's part raises, or makes no number of, may be theirs."""
    try:
        inputs = _some_inputs(algorithm)
        with tracing(f"the loss of {algorithm.named}"):
            shape = inputs["mask"].shape
            jax.eval_shape(
                lambda arrays: check_token_loss(
                    algorithm, algorithm.token_loss(LossInputs(**arrays)), shape
                ),
                inputs,
            )
        if not learns_from_rows(settings.algorithm, settings.data):
            _try_host(algorithm, settings)
    except (LoweringError, ContractError, AlgorithmRaised) as error:
        told = error.__cause__ if isinstance(error, LoweringError) else error
        text = str(told if isinstance(told, ContractError | AlgorithmRaised) else error)
        if "NoneType" in text and "raised" in text:
            text += "; a setting that it reads must be in the `defaults` of its class"
        raise ConfigError([text]) from error


def _try_host(algorithm: Any, settings: Settings) -> None:
    """Raises ContractError."""
    size = max(settings.rollout.group_size, 1)
    rewards = [float(i % 2) for i in range(size)]
    groups = [fake_group(i, rewards, [12] * size) for i in range(2)]
    learner = replace(settings.learner, row_tokens=32)
    batch = pack(groups, learner)
    extras = dict.fromkeys(algorithm.needs, batch.behaviour_logprobs)
    try:
        for group in groups:
            selected(group, algorithm.select)
        with_advantages(batch, groups, extras, algorithm, None, settings.algorithm)
    except (NotFinite, AlgorithmRaised, RewardPartError):
        pass  # of these rewards and log-probs; a run has its own


def _some_inputs(algorithm: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Of LossInputs: the shapes of a microbatch of one row, with all that the algorithm asked for."""
    names = [f.name for f in fields(LossInputs)]
    told = algorithm.token_inputs((), (), dict.fromkeys(algorithm.needs, ()), None)
    check_mapping(algorithm, "token_inputs", told)
    optional = {f.name for f in fields(LossInputs) if f.default is None}
    there = [n for n in names if n not in optional or n in {*algorithm.needs, *told, "lag"}]
    dtypes = {"mask": bool} | dict.fromkeys(("segment_ids", "turn_ids", "lag"), "int32")
    return {n: jax.ShapeDtypeStruct((1, 8), dtypes.get(n, "float32")) for n in there}


def _role_errors(settings: Settings, algorithm: Any, vocab_size: int) -> list[str]:
    """What only the algorithm itself (it may be a plugin) and the tokenizer can tell about the roles."""
    name, needs = settings.algorithm.name, frozenset(algorithm.needs)
    # The reward model that learns has no policy beside it, so nothing samples: an algorithm of the table alone.
    roles = NEEDED_ROLE.keys() - (set() if name in ALGORITHMS else {"rewards"})
    if unknown := sorted(needs - roles):
        return [f"algorithm.name={name} needs {', '.join(unknown)}, which no role computes"]
    if errors := list(role_errors(settings, needs)):
        return errors
    for where in sorted({NEEDED_ROLE[need] for need in needs}):
        if path := getattr(getattr(settings, where, None), "checkpoint", ""):
            source = find_source(where, path, settings.model)
            error = vocabulary_error(where, source.model, settings.model, vocab_size)
            errors += [error] if error else []
    return errors


def prepare_tasks(settings: Settings, pool: EnvPool, mode: str) -> None:
    """Import the environments, list their tasks, and see that they offer what the config and the mode ask of them.

    Raises ConfigError: an environment that cannot even list its tasks is a wrong config, not a budget that ran out.
    """
    try:
        pool.prepare()
    except EnvError as error:
        raise ConfigError([str(error)]) from None
    errors, held_out = shared_ids(pool, settings.tasks.sources), False
    for i, source in enumerate(settings.tasks.sources):
        where, splits = f"tasks.sources[{i}]", pool.splits(source.tag)
        held_out = held_out or any(split != "train" for split in splits)
        if "train" not in splits:
            errors.append(
                f"{where}.env={source.env} has no split train, only {', '.join(splits)}; add one to its tasks()"
            )
        reads = learns_from_rows(settings.algorithm, settings.data)  # and here not from a file
        warms = mode in ("train", "rollout_only") and settings.warm_start.steps
        plays = (warms or mode == "train" and reads) and source.script_episodes
        if plays and not pool.has_script(source.tag):
            errors.append(
                f"{where}.script_episodes={source.script_episodes}, but environment {source.env} has no script();"
                f" set it to 0{'' if reads else ', or warm_start.steps to 0'}"
            )
    if mode == "eval" and not held_out:
        errors.append(
            "--mode=eval: no environment has a split beside train; add one to its tasks()"
        )
    if errors:
        raise ConfigError(errors)


def shared_ids(pool: EnvPool, sources: Sequence[TaskSource]) -> list[str]:
    """One line for each held-out split that has ids of train: what is measured on these was trained on."""
    errors = []
    for i, source in enumerate(sources):
        splits = pool.splits(source.tag)
        if "train" not in splits:
            continue
        trained = {task.id for task in pool.list_tasks(source.tag, "train")}
        for split in splits:
            tasks = pool.list_tasks(source.tag, split) if split != "train" else ()
            if both := [task.id.partition("/")[2] for task in tasks if task.id in trained]:
                some = ", ".join(map(repr, both[:3])) + (", ..." if len(both) > 3 else "")
                errors.append(
                    f"tasks.sources[{i}].env={source.env}: {len(both)} of the {len(tasks)} tasks of split {split} have"
                    f" ids of train ({some}), so what is held out was trained on; give each split tasks, and ids, of"
                    " its own in tasks()"
                )
    return errors


def build_model(settings: Settings, resolve: Resolve, vocab_size: int) -> Model:
    """The model's shapes and functions. vocab_size: the tokenizer's. Raises ConfigError."""
    build = resolve(settings.model.family, MODELS)
    try:
        return build(settings.model, settings.model.vocab_size or vocab_size)
    except ValueError as error:
        raise ConfigError([f"model.family={settings.model.family}: {error}"]) from error


@dataclass(frozen=True)
class RoundTrip:
    """What of a source was rendered, tokenized and read back."""

    what: str  # "a scripted episode", or "the first observation" and why no more
    num_turns: int
    num_tokens: int  # of the whole context
    num_sampled: int  # of them, what the policy would have sampled
    is_rewritten: bool = False  # the template shows another history than was seen


@dataclass(frozen=True)
class LongestPrompt:
    """Of the first prompts (task messages and first observation) that were counted of a split."""

    split: str
    num_tasks: int
    num_counted: int
    task_id: str
    num_tokens: int
    limit: int  # what engine.context leaves beside a turn of rollout.max_new_tokens


@dataclass(frozen=True)
class Opening:
    """What stands before the first turn of a task, and what may follow it."""

    messages: tuple[Message, ...]  # the task's, and the first observation where it was asked for
    tools: Tools
    max_turns: int

    @classmethod
    def of(cls, task: Task, settings: Settings, seen: Sequence[Message] = ()) -> "Opening":
        limit = settings.rollout.max_turns or task.max_turns
        return cls((*task.messages, *seen), task.tools, limit)


@dataclass(frozen=True)
class Played:
    trip: RoundTrip
    prompts: tuple[LongestPrompt, ...]
    opening: Opening


def play(settings: Settings, pool: EnvPool, renderer: Renderer) -> dict[str, Played]:
    """By tag: one scripted episode, or the first observation of an environment without a script, there and back; and
    the longest first prompt of each split. Ends the pool.

    Raises ConfigError for an episode that cannot be played, or whose tokens do not decode to what was said.
    """

    async def run() -> dict[str, Played]:
        try:
            await pool.start()
            trip = _Trip(settings, pool, renderer)
            return {source.tag: await trip.of(source) for source in settings.tasks.sources}
        finally:
            await pool.close()

    return run_blocking(run())


def check_prompts(settings: Settings, prompts: Mapping[str, Sequence[LongestPrompt]]) -> None:
    """Raises ConfigError naming the longest prompt of each split that has one over the limit."""
    errors = [
        _over(settings, tag, f"first prompt of task {p.task_id}", p.num_tokens, p.limit)
        for tag, longest in prompts.items()
        for p in longest
        if p.num_tokens > p.limit
    ]
    if errors:
        raise ConfigError(errors)


def check_messages(settings: Settings, pool: EnvPool, tokenizer: Tokenizer) -> None:
    """Raises ConfigError naming a task whose own messages leave no room for a turn, of each split; no environment is
    asked, so a first observation comes on top."""
    errors = []
    limit = settings.engine.context - settings.rollout.max_new_tokens
    for tag in (source.tag for source in settings.tasks.sources):
        for split in pool.splits(tag):
            tasks = pool.list_tasks(tag, split)
            for task in (tasks[i] for i in _longest(tasks)):
                num = sum(len(tokenizer.encode(message.content)) for message in task.messages)
                if num > limit:
                    errors.append(_over(settings, tag, f"text of task {task.id}", num, limit))
                    break
    if errors:
        raise ConfigError(errors)


def check_first_prompts(
    settings: Settings, pool: EnvPool, renderer: Renderer
) -> dict[str, Opening]:
    """Raises ConfigError as check_prompts, of a few tasks of each split, asked for FIRST_LOOK_S (a tag of which nothing
    is known for longer, as first_observations); and where no reset of a tag came back, though several were tried. What
    an environment is slow at, or fails now and then, is left to its episodes. The pool is prepared, and stays so.

    Returns: by tag, the opening of a task of train.
    """
    asked = [
        (source.tag, split, task)
        for source in settings.tasks.sources
        for split in pool.splits(source.tag)
        for task in _few(pool.list_tasks(source.tag, split))
    ]
    seen = pool.first_observations([task for *_, task in asked], settings.seed, FIRST_LOOK_S)
    _check_resets(settings, [task for *_, task in asked], seen)
    limit = settings.engine.context - settings.rollout.max_new_tokens
    longest: dict[tuple[str, str], LongestPrompt] = {}
    openings: dict[str, Opening] = {}
    for (tag, split, task), result in zip(asked, seen):
        if split == "train" and not (tag in openings and openings[tag].messages):
            said = result.messages if isinstance(result, StepResult) else ()
            openings[tag] = Opening.of(task, settings, said)
        if not isinstance(result, StepResult):
            continue
        try:
            num = len(renderer.first([*task.messages, *result.messages], task.tools))
        except ValueError as error:
            raise ConfigError([f"tag {tag}: {error}"]) from error
        known = longest.get((tag, split))
        if known is None or num > known.num_tokens:
            num_tasks = len(pool.list_tasks(tag, split))
            longest[tag, split] = LongestPrompt(split, num_tasks, NUM_FIRST, task.id, num, limit)
    prompts: dict[str, list[LongestPrompt]] = {}
    for (tag, _), one in longest.items():
        prompts.setdefault(tag, []).append(one)
    check_prompts(settings, prompts)
    return openings


def _check_resets(
    settings: Settings, tasks: Sequence[Task], seen: Sequence[StepResult | EnvError | None]
) -> None:
    """Raises ConfigError for each tag whose resets failed by themselves, several of them and none else came back."""
    errors = []
    for source in settings.tasks.sources:
        results = [result for task, result in zip(tasks, seen) if task.tag == source.tag]
        failed = [r for r in results if isinstance(r, EnvError) and r.kind != "env_lost"]
        if len(failed) >= min(2, len(results)) and not any(
            isinstance(result, StepResult) for result in results
        ):
            errors.append(
                f"tag {source.tag}: {len(failed)} of {source.env}'s tasks were reset, and each failed; the first:"
                f" {failed[0].detail}; mend it{', or raise the deadline' if failed[0].kind == 'env_timeout' else ''}"
            )
    if errors:
        raise ConfigError(errors)


def _few(tasks: Sequence[Task]) -> list[Task]:
    """NUM_FIRST at most: half that themselves say most, half from all over the split."""
    spread = range(0, len(tasks), max(len(tasks) * 2 // NUM_FIRST, 1))
    some = dict.fromkeys([*_longest(tasks)[: NUM_FIRST // 2], *spread])
    return [tasks[i] for i in list(some)[:NUM_FIRST]]


def _over(settings: Settings, tag: str, what: str, num_tokens: int, limit: int) -> str:
    return (
        f"tag {tag}: the {what} has {num_tokens} tokens, above the {limit} that"
        f" engine.context={settings.engine.context} leaves beside rollout.max_new_tokens="
        f"{settings.rollout.max_new_tokens}; raise engine.context to at least"
        f" {num_tokens + settings.rollout.max_new_tokens} (and learner.row_tokens with it), or shorten the task"
    )


def _longest(tasks: Sequence[Task]) -> list[int]:
    """Indices of those that themselves say most."""
    sizes = [sum(len(message.content) for message in task.messages) for task in tasks]
    return sorted(range(len(tasks)), key=lambda i: -sizes[i])[:NUM_LONGEST]


def to_count(tasks: Sequence[Task]) -> list[Task]:
    """The tasks whose first prompts are counted: all over the split, and those that themselves say most."""
    spread = range(0, len(tasks), max(len(tasks) // NUM_PROMPTS, 1))
    return [tasks[i] for i in sorted({*spread, *_longest(tasks)})]


@dataclass
class _Trip:
    settings: Settings
    pool: EnvPool
    renderer: Renderer

    async def of(self, source: TaskSource) -> Played:
        try:
            trip = await self._there_and_back(source)
            prompts = [
                await self._longest(source.tag, split) for split in self.pool.splits(source.tag)
            ]
            task = self.pool.list_tasks(source.tag, "train")[0]
            messages, _ = await self._first(task)
            seen = messages[len(task.messages) :]
            return Played(trip, tuple(prompts), Opening.of(task, self.settings, seen))
        except (EnvError, ScriptError, ValueError) as error:
            raise ConfigError([f"tag {source.tag}: {error}"]) from error

    async def _there_and_back(self, source: TaskSource) -> RoundTrip:
        if not self.pool.has_script(source.tag):
            return await self._observation(source, "the environment has no script()")
        try:
            return await self._episode(source)
        except ScriptError as error:
            if self.settings.warm_start.steps and source.script_episodes:
                raise
            return await self._observation(source, str(error))

    async def _episode(self, source: TaskSource) -> RoundTrip:
        s, tasks = self.settings, self.pool.list_tasks(source.tag, "train")
        rules = EpisodeRules.of(
            s.rollout, s.engine.context, s.serve.turn_deadline_s, s.learner.row_tokens
        )
        plan = ScriptPlan(1, 1.0, s.seed)
        (episode,) = await scripted_episodes(self.pool, tasks[:1], self.renderer, rules, plan)
        self._compare(_said(episode), episode.context())
        if source.reward == ENV_SCORER:
            reward = from_steps([step.reward for step in episode.steps])
            if reward.status != "scored":
                raise ValueError(f"a scripted episode of task {episode.task.id}: {reward.detail}")
        # What the last step said is not rendered.
        talk = episode.conversation[: len(episode.conversation) - len(episode.steps[-1].messages)]
        turns = [turn.tokens for turn in episode.turns]
        return RoundTrip(
            "a scripted episode",
            len(episode.turns),
            len(episode.context()),
            episode.num_tokens,
            is_rewritten(self.renderer, talk, episode.task.tools, turns),
        )

    async def _observation(self, source: TaskSource, why: str) -> RoundTrip:
        messages, tokens = await self._first(self.pool.list_tasks(source.tag, "train")[0])
        self._compare([message.content for message in messages], tokens)
        return RoundTrip(f"the first observation ({why})", 0, len(tokens), 0)

    async def _longest(self, tag: str, split: str) -> LongestPrompt:
        settings, tasks = self.settings, self.pool.list_tasks(tag, split)
        counted, sizes, size = to_count(tasks), [], settings.rollout.env_workers
        for start in range(0, len(counted), size):  # one in each worker
            found = await asyncio.gather(*map(self._first, counted[start : start + size]))
            sizes += [len(tokens) for _, tokens in found]
        longest = max(range(len(counted)), key=sizes.__getitem__)
        limit = settings.engine.context - settings.rollout.max_new_tokens
        return LongestPrompt(
            split, len(tasks), len(counted), counted[longest].id, sizes[longest], limit
        )

    async def _first(self, task: Task) -> tuple[list[Message], Any]:
        """The messages before the first turn, and their tokens."""
        handle = await self.pool.open(task, f"dry_run/{task.id}", self.settings.seed)
        messages = [*task.messages, *(await handle.reset()).messages]
        await handle.close()
        return messages, self.renderer.first(messages, task.tools)

    def _compare(self, said: Sequence[str], tokens: Any) -> None:
        """Raises ValueError unless the tokens decode to all that was said, in order."""
        text, at = unicodedata.normalize("NFC", self.renderer.tokenizer.decode(tokens)), 0
        for piece in (unicodedata.normalize("NFC", encodable(one)) for one in said):
            # A template may trim what is said, or write it as JSON.
            forms = (piece, piece.strip(), json.dumps(piece, ensure_ascii=False)[1:-1])
            found, piece = next(
                ((place, form) for form in forms if (place := text.find(form, at)) >= 0),
                (-1, piece),
            )
            if found < 0:
                raise ValueError(
                    f"{piece[:80]!r} was said, but the tokens decode to {text[at : at + 80]!r} there; the tokenizer"
                    " does not keep the text"
                )
            at = found + len(piece)


def _said(episode: Episode) -> list[str]:
    """Every text that is on the episode's context, in order."""
    num_first = len(episode.messages) - sum(len(step.messages) for step in episode.steps)
    said = [message.content for message in episode.messages[:num_first]]
    for i, text in enumerate(episode.texts):
        said.append(text)
        if i + 1 < len(episode.texts):  # what the last step answered is not rendered
            said += [message.content for message in episode.steps[i].messages]
    return said
