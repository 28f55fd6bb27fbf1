"""What the values of a config may be, alone and together: every rule, one error line each, all at once.

Owns: INTERVALS (numbers), CHOICES (words), the names that stand in a table, and the rules across fields. An error line
is `key=value what is wrong; the remedy`. Invariant: nothing that is accepted is later ignored, and what this version
cannot do is refused with the reason, not tried.
Must not: import jax or an environment's or plugin's module (only tables of names are read), or look at a device.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_jax import schema
from rl_jax.algorithms import ALGORITHMS, options
from rl_jax.algorithms.rules import rules
from rl_jax.algorithms.staleness import AGE_OF
from rl_jax.data.check import data_errors
from rl_jax.mesh import MeshPlan
from rl_jax.model_source import TOKENIZER_FILE
from rl_jax.models import MODELS
from rl_jax.models.features import ACTIVATIONS, ROPE_FIELDS, context_errors, feature_errors
from rl_jax.progress import PROGRESS_FORMS
from rl_jax.role_source import NEEDED_ROLE, role_errors
from rl_jax.rollout.bound import ADAPTIVE, POLICIES
from rl_jax.rollout.curriculum import curriculum_errors
from rl_jax.rollout.scheduler import SCHEDULERS
from rl_jax.settings import MeshSettings, Settings
from rl_jax.settings_watch import steps_range
from rl_jax.tokens import TOKENIZERS, TOOL_PARSERS
from rl_jax.types import MAX_SUPPORT
from rl_jax.validate_cluster import ELSEWHERE, HERE, cluster_errors
from rl_jax.validate_rewards import reward_errors
from rl_jax.validate_watch import watch_errors

MODES = ("train", "eval", "rollout_only", "train_only")
TOP_LEVEL = (
    "rl_jax",
    "kernels",
    "envs",
    "mesh_configs",
)  # packages that must come from one checkout

MIN_BALANCED = 3  # servers, for two splits to choose from

# Key -> the interval its number must lie in. A key that is absent is checked by a rule, by MeshPlan.check, or is free.
INTERVALS = {
    "seed": "[0, 9223372036854775807]",
    "steps": "[0, inf)",
    "model.vocab_size": "[0, inf)",
    "model.num_layers": "[1, inf)",
    "model.embed_size": "[1, inf)",
    "model.num_heads": "[1, inf)",
    "model.num_kv_heads": "[1, inf)",
    "model.head_dim": "[2, inf)",
    "model.mlp_size": "[1, inf)",
    "model.rope_theta": "(0, inf)",
    "model.rope_theta_local": "[0, inf)",
    "model.rope.factor": "[1, inf)",
    "model.rope.original_context": "[0, inf)",
    "model.rope.low_freq_factor": "(0, inf)",
    "model.rope.high_freq_factor": "(0, inf)",
    "model.rope.beta_fast": "(0, inf)",
    "model.rope.beta_slow": "(0, inf)",
    "model.rope.attention_factor": "[0, inf)",
    "model.window": "[0, inf)",
    "model.full_every": "[0, inf)",
    "model.attention_scale": "[0, inf)",
    "model.attention_softcap": "[0, inf)",
    "model.logit_softcap": "[0, inf)",
    "model.norm_eps": "(0, 1)",
    "model.max_context": "[0, inf)",
    "engine.slots": "[1, inf)",
    "engine.context": "[2, inf)",
    "engine.page_size": "[1, inf)",
    "engine.num_pages": "[0, inf)",
    "engine.steps_per_block": "[1, inf)",
    "engine.chunk_requests": "[1, inf)",
    "engine.num_stop_tokens": "[1, inf)",
    "engine.append_limit": "[0, inf)",
    "serve.queue_size": "[1, inf)",
    "serve.turn_deadline_s": "(0, inf)",
    "serve.chunks_per_block": "[1, inf)",
    "serve.compile_deadline_s": "(0, inf)",
    "serve.progress_timeout_s": "(0, inf)",
    "serve.stop_deadline_s": "(0, inf)",
    "tasks.curriculum.window": "[1, inf)",
    "tasks.curriculum.tau": "(0, inf)",
    "tasks.curriculum.floor": "[0, 1]",
    "rollout.batch_groups": "[1, inf)",
    "rollout.group_size": "[1, inf)",
    "rollout.max_staleness": "[0, inf)",
    "rollout.extra_groups": "[0, inf)",
    "rollout.extra_members": "[0, inf)",
    "rollout.temperature": "[0, inf)",
    "rollout.top_p": "(0, 1]",
    "rollout.top_k": "[0, inf)",
    "rollout.max_new_tokens": "[1, inf)",
    "rollout.max_turns": "[0, inf)",
    "rollout.env_workers": "[1, inf)",
    "rollout.envs_per_worker": "[1, inf)",
    "rollout.reset_timeout_s": "(0, inf)",
    "rollout.step_timeout_s": "(0, inf)",
    "rollout.start_timeout_s": "(0, inf)",
    "rollout.episode_timeout_s": "(0, inf)",
    "rollout.max_obs_bytes": "[64, inf)",
    "rollout.max_attempts": "[1, inf)",
    "rollout.max_env_failures": "[1, inf)",
    "rollout.take_timeout_s": "(0, inf)",
    "rollout.max_filtered_batches": "[1, inf)",
    "rewards.timeout_s": "(0, inf)",
    "rewards.workers": "[1, inf)",
    "rewards.keep_alive_s": "[0, inf)",
    "rewards.connect_timeout_s": "(0, inf)",
    "rewards.read_timeout_s": "(0, inf)",
    "rewards.total_timeout_s": "(0, inf)",
    "rewards.retries": "[0, inf)",
    "rewards.retry_budget": "[0, inf)",
    "rewards.connections": "[1, inf)",
    **{f"algorithm.{key}": interval for key, interval in options.INTERVALS.items()},
    "data.eval_share": "[0, 1)",
    "data.batch_rows": "[1, inf)",
    "data.epochs": "[0, inf)",
    "data.deadline_s": "(0, inf)",
    "warm_start.steps": "[0, inf)",
    "warm_start.batch_episodes": "[1, inf)",
    "warm_start.learning_rate": "(0, inf)",
    "learner.learning_rate": "(0, inf)",
    "learner.warmup_steps": "[0, inf)",
    "learner.adam_b1": "[0, 1)",
    "learner.adam_b2": "[0, 1)",
    "learner.adam_eps": "(0, inf)",
    "learner.weight_decay": "[0, inf)",
    "learner.grad_clip": "(0, inf)",
    "learner.row_tokens": "[2, inf)",
    "learner.microbatch_rows": "[1, inf)",
    "learner.logprob_chunk": "[1, inf)",
    "learner.max_skipped": "[1, inf)",
    "critic.learning_rate": "(0, inf)",
    "critic.warmup_steps": "[0, inf)",
    "critic.weight_decay": "[0, inf)",
    "critic.grad_clip": "(0, inf)",
    "critic.updates": "[1, inf)",
    "critic.value_clip": "[0, inf)",
    "critic.head_start": "[0, inf)",
    "weights.bucket_bytes": "[1, inf)",
    "weights.deadline_s": "(0, inf)",
    "weights.retries": "[0, inf)",
    "weights.max_failures": "[1, inf)",
    "checkpoint.every": "[0, inf)",
    "checkpoint.keep": "[1, inf)",
    "checkpoint.deadline_s": "(0, inf)",
    "eval.every": "[0, inf)",
    "eval.episodes": "[1, inf)",
    "eval.temperature": "[0, inf)",
    "eval.top_p": "(0, 1]",
    "eval.top_k": "[0, inf)",
    "eval.timeout_s": "(0, inf)",
    "metrics.heartbeat_s": "(0, inf)",
    "metrics.rollouts_every": "[0, inf)",
    "metrics.timeline_bytes": "[0, inf)",
    "metrics.tracker_samples": "[0, 64]",
    "metrics.tracker_sample_bytes": "[64, 1048576]",
    "metrics.port": "[0, 65535]",
    "cluster.port": "[0, 65535]",
    "cluster.heartbeat_s": "(0, inf)",
    "cluster.lease_s": "(0, inf)",
    "cluster.start_timeout_s": "(0, inf)",
    "cluster.restarts": "[0, inf)",
    "cluster.stores": "[0, inf)",
    "cluster.learner_processes": "[0, inf)",
    "cluster.learner_deadline_s": "(0, inf)",
    "cluster.learner_journal_bytes": "[1, inf)",
    "guards.truncated_above": "[0, 1]",
    "guards.ess_below": "[0, 1]",
    "guards.k3_above": "(0, inf)",
    "guards.lag0_above": "[0, inf)",
    "guards.every": "[1, inf)",
}

SOURCE_INTERVALS = {  # of each task source
    "max_live": "[0, inf)",
    "script_episodes": "[0, inf)",
    "script_skill": "[0, 1]",
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.activation": ACTIVATIONS,
    "model.rope.scaling": tuple(ROPE_FIELDS),
    "mesh.platform": ("", "cpu", "gpu"),
    "tasks.curriculum.name": ("none", "dump"),
    "rollout.age_of": AGE_OF,
    "rollout.staleness_policy": POLICIES,
    "rollout.env_stepping": ("trajectory", "batch"),
    "rollout.history": ("keep", "template"),
    "rollout.short_group_infra": ("replace", "survivors", "drop"),
    "rollout.short_group_stale": ("replace", "survivors", "drop"),
    **{f"algorithm.{key}": choices for key, choices in options.CHOICES.items()},
    "data.train_on": ("all", "last"),
    "data.too_long": ("drop", "truncate", "error"),
    "learner.schedule": ("constant", "linear", "cosine"),
    "critic.schedule": ("constant", "linear", "cosine"),
    "learner.remat": ("none", "elementwise", "layer"),
    "learner.attention": ("auto", "plain", "cudnn", "splash"),
    "serve.pd_balance": ("fixed", "auto"),
    "serve.affinity": ("declared", "auto"),
    "weights.kv": ("recompute", "keep"),
    "weights.transport": ("auto", *HERE, *ELSEWHERE),
    "metrics.progress": PROGRESS_FORMS,
    "cluster.backend": ("inproc", "local", "external", "ray"),
    "cluster.workers": ("cluster", "driver"),
    **dict.fromkeys(
        [
            f"guards.{name}"
            for name in ("zero_signal", "nonfinite", "truncated", "ess", "k3", "lag0")
        ],
        ("warn", "raise", "off"),
    ),
}

NAMES: dict[str, Mapping[str, Any]] = {
    "model.family": MODELS,
    "rollout.scheduler": SCHEDULERS,
    "algorithm.name": ALGORITHMS,
}

_PLUGIN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TAG = re.compile(r"[a-z][a-z0-9_]*")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check(settings: Settings, mode: str = "train") -> list[str]:
    """Everything that is wrong with a config, one line each; [] if nothing is."""
    values = schema.leaves(schema.to_tree(settings))
    errors = [e for key, text in INTERVALS.items() for e in _interval(key, values[key], text)]
    for key, choices in CHOICES.items():
        if values[key] not in (*choices, None):
            known = ", ".join(choice or '"" (empty)' for choice in choices)
            errors.append(f"{key}={values[key]} is not one of {known}")
    for key, table in NAMES.items():
        errors += check_name(key, values[key], table)
    errors += _tokenizer_errors(settings.model.tokenizer)
    errors += check_name(
        "rollout.tool_parser", settings.rollout.tool_parser, {"auto": "", **TOOL_PARSERS}
    )
    errors += _task_errors(settings)
    errors += watch_errors(settings.metrics, check_name)
    sound = _repaired(settings, [error.partition("=")[0] for error in errors])
    for rule in RULES:
        errors += rule(sound)
    errors += algorithm_errors(sound)
    reads = mode == "train" and options.learns_from_rows(sound.algorithm, sound.data)
    if mode != "eval":
        errors += [*(() if reads else _training_errors(sound)), *role_errors(sound)]
    errors += data_errors(sound, options.entry_of(sound.algorithm).rows, mode)
    return [*errors, *_mode_errors(sound, mode), *_mesh_errors(sound)]


def check_name(key: str, name: str, table: Mapping[str, Any]) -> list[str]:
    """A name of the table, or "package.module:attribute" of a package that can be found."""
    if name in table:
        return []
    if ":" in name:
        if not _PLUGIN.fullmatch(name):
            return [f'{key}={name} is not of the form "package.module:attribute"']
        package = name.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return [f"{key}={name}: there is no package {package}; install it or extend PYTHONPATH"]
        return []
    near = schema.nearest(name, table) or sorted(table)
    return [f'{key}={name} is unknown; use {", ".join(near)}, or "package.module:attribute"']


def _tokenizer_errors(name: str) -> list[str]:
    """A name as check_name takes it, or a directory."""
    if not name or (Path(name) / TOKENIZER_FILE).is_file():
        return []
    if Path(name).is_dir():
        return [
            f"model.tokenizer={name} is a directory without {TOKENIZER_FILE}; give one that holds it"
        ]
    found = check_name("model.tokenizer", name, TOKENIZERS)
    return [f"{error}, or a directory that holds {TOKENIZER_FILE}" for error in found]


def foreign_packages(root: Path) -> list[str]:
    """One line for each of our top-level packages that Python would import from outside the checkout at `root`."""
    errors = []
    for name in TOP_LEVEL:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or [spec.origin]) if spec else []
        if not any(place and Path(place).resolve() == (root / name).resolve() for place in places):
            found = ", ".join(str(place) for place in places) or "nowhere"
            errors.append(
                f"package {name} comes from {found}, not from {root / name}; uninstall the other package of that"
                f" name, or start from {root}"
            )
    return errors


def _repaired(settings: Settings, wrong: Sequence[str]) -> Settings:
    """The settings with a default for each key in error, so that the rules across fields need not guard against it."""
    defaults = Settings()
    for key in wrong:
        section, _, name = key.rpartition(".")
        if not section and hasattr(defaults, name):
            settings = replace(settings, **{name: getattr(defaults, name)})
        elif hasattr(getattr(defaults, section, None), name):
            part = replace(
                getattr(settings, section), **{name: getattr(getattr(defaults, section), name)}
            )
            settings = replace(settings, **{section: part})
    return settings


def _interval(key: str, value: float | None, text: str) -> Iterator[str]:
    if value is None:  # the algorithm's own
        return
    low, high = (float(part) for part in text[1:-1].split(","))
    inside = (value >= low if text[0] == "[" else value > low) and (
        value <= high if text[-1] == "]" else value < high
    )
    if inside:
        return
    if math.isinf(high):
        wanted = f"at least {low:g}" if text[0] == "[" else f"above {low:g}"
    else:
        wanted = f"in {text}"
    yield f"{key}={value} must be {wanted}"


def _task_errors(s: Settings) -> list[str]:
    from envs import (
        ENVS,
    )  # not above: foreign_packages must be able to say that `envs` is somebody else's

    errors = [] if s.tasks.sources else ["tasks.sources=() is empty; give at least one source"]
    tags = [source.tag for source in s.tasks.sources]
    for i, source in enumerate(s.tasks.sources):
        where = f"tasks.sources[{i}]"
        errors += check_name(f"{where}.env", source.env, ENVS)
        for name, interval in SOURCE_INTERVALS.items():
            errors += _interval(f"{where}.{name}", getattr(source, name), interval)
        if not _TAG.fullmatch(source.tag):
            errors.append(f"{where}.tag={source.tag!r} must be lower-case letters, digits and _")
        elif tags.index(source.tag) < i:
            errors.append(
                f"{where}.tag={source.tag} is also the tag of another source; tags are unique"
            )
    errors += reward_errors(s, check_name)
    if s.run_id and not _RUN_ID.fullmatch(s.run_id):
        errors.append(
            f"run_id={s.run_id!r} must be letters, digits, and . _ - (it is a part of every episode's uid)"
        )
    return errors


# --- rules across fields -------------------------------------------------------------------------------------------


def _model(s: Settings) -> Iterator[str]:
    m = s.model
    if m.num_heads % m.num_kv_heads:
        fits = [n for n in range(1, m.num_heads + 1) if m.num_heads % n == 0]
        yield f"model.num_kv_heads={m.num_kv_heads} does not divide num_heads={m.num_heads}; use one of {fits}"
    if m.head_dim % 2:
        yield f"model.head_dim={m.head_dim} is odd; rope rotates pairs, use {m.head_dim + 1}"
    yield from feature_errors(m)


def _engine(s: Settings) -> Iterator[str]:
    e = s.engine
    sizes = list(e.chunk_sizes)
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        yield f"engine.chunk_sizes={tuple(sizes)} must be positive and ascending, at least one"
    if e.page_size > 0 and e.context > 0 and 0 < e.num_pages < e.table_pages:
        yield (
            f"engine.num_pages={e.num_pages} is below the {e.table_pages} pages of engine.page_size={e.page_size} that"
            f" one history of engine.context={e.context} takes; use at least {e.table_pages}, or 0 for all slots'"
        )
    if s.rollout.max_new_tokens >= e.context:
        yield (
            f"rollout.max_new_tokens={s.rollout.max_new_tokens} leaves no room for a prompt in"
            f" engine.context={e.context}; use less, or a longer context"
        )
    yield from context_errors(s.model, e.context)
    if s.learner.row_tokens < e.context:
        yield (
            f"learner.row_tokens={s.learner.row_tokens} is below engine.context={e.context}: a trajectory lies whole"
            f" in one row; use at least {e.context}"
        )


def algorithm_errors(s: Settings) -> Iterator[str]:
    """What is wrong with the algorithm's settings, alone and beside the rollout's; of a plugin, once it is loaded."""
    reads = options.learns_from_rows(s.algorithm, s.data)
    yield from rules(s.algorithm, 2 if reads else s.rollout.group_size)
    if (age := s.algorithm.correction.max_token_age) >= s.rollout.max_staleness and age:
        yield (
            f"algorithm.correction.max_token_age={age} leaves no token out: rollout.max_staleness="
            f"{s.rollout.max_staleness} already bounds the age; use less, or 0"
        )
    if options.entry_of(s.algorithm).needs_lag and not s.rollout.max_staleness:
        yield (
            f"algorithm.name={s.algorithm.name} pulls tokens back to the policy that sampled, which at"
            " rollout.max_staleness=0 is the one that trains; raise it, or use another algorithm"
        )
    for need in sorted(options.needs(s.algorithm) - NEEDED_ROLE.keys()):
        cause, remedy = options.needed_by(s.algorithm, need)
        yield f"{cause} needs {need}, which no role computes; {remedy}"


def _batch(s: Settings) -> Iterator[str]:
    num_tags, n = len(s.tasks.sources), s.rollout.batch_groups
    has_curriculum = s.tasks.curriculum.name != "none"
    if n % num_tags and not has_curriculum:
        yield (
            f"rollout.batch_groups={n} does not divide into {num_tags} tags, which take equal shares;"
            f" use {n - n % num_tags or num_tags} or {n - n % num_tags + num_tags}"
        )
    if (extra := s.rollout.extra_groups) % num_tags and not has_curriculum:
        yield (
            f"rollout.extra_groups={extra} does not divide into {num_tags} tags, which have equal shares;"
            f" use {extra - extra % num_tags} or {extra - extra % num_tags + num_tags}"
        )
    asked = (n + extra) * (s.rollout.group_size + s.rollout.extra_members)
    places = s.rollout.env_workers * s.rollout.envs_per_worker
    if (extra or s.rollout.extra_members) and asked > places:
        yield (
            f"rollout.extra_groups={extra} and rollout.extra_members={s.rollout.extra_members} make {asked} episodes a"
            f" step, of which rollout.env_workers x envs_per_worker={places} live at once: what waits for a place"
            " replaces nobody; ask for less, or raise rollout.envs_per_worker"
        )
    tags = {source.tag for source in s.tasks.sources}
    for i, pool in enumerate(s.mesh.pools):
        for tag in sorted(set(pool.tags) - tags):
            yield f"mesh.pools[{i}].tags has {tag!r}, which no task source has; tags are {', '.join(sorted(tags))}"


def _schedule(s: Settings) -> Iterator[str]:
    falls, warmup = s.learner.schedule != "constant", s.learner.warmup_steps
    if s.data.epochs:
        pass  # steps are known once the rows are read
    elif warmup > s.steps > 0:
        yield f"learner.warmup_steps={warmup} is beyond steps={s.steps}; the full rate is never reached"
    elif falls and warmup == s.steps > 0:
        yield (
            f"learner.warmup_steps={warmup} leaves nothing of steps={s.steps} for learner.schedule="
            f"{s.learner.schedule}; lower it, or use constant"
        )
    num_scripted, size = (
        sum(t.script_episodes for t in s.tasks.sources),
        s.warm_start.batch_episodes,
    )
    if s.warm_start.steps and 0 < num_scripted < size:
        yield (
            f"warm_start.batch_episodes={size} is more than the {num_scripted} scripted episodes of all task sources;"
            f" use at most {num_scripted}, or raise tasks.sources[..].script_episodes"
        )
    if s.warm_start.steps and not num_scripted:
        yield (
            f"warm_start.steps={s.warm_start.steps} needs scripted episodes, but script_episodes of every task source"
            " is 0; give some, or set it to 0"
        )


def _profile(s: Settings) -> Iterator[str]:
    try:
        steps_range(s.metrics.profile_steps or "1:1")
    except ValueError as error:
        yield f"metrics.profile_steps={error}"


RULES: tuple[Callable[[Settings], Iterator[str]], ...] = (
    _model,
    _engine,
    _batch,
    curriculum_errors,
    _schedule,
    _profile,
    cluster_errors,
)


def _training_errors(s: Settings) -> Iterator[str]:
    r = s.rollout
    if r.staleness_policy == ADAPTIVE and r.max_staleness < 2:
        yield (
            f"rollout.staleness_policy={ADAPTIVE} chooses 1 to rollout.max_staleness={r.max_staleness}, which leaves no"
            " choice; use max_staleness of at least 2, or fixed"
        )
    if r.temperature == 0:
        yield "rollout.temperature=0 is greedy: its log-probs cannot be trained; use 1.0 (eval.temperature may be 0)"
    if r.top_p < 1 and r.top_k == 0:
        yield (
            f"rollout.top_p={r.top_p} alone may leave any number of tokens, and training keeps the ids a token was"
            f" sampled from, at most {MAX_SUPPORT}; set rollout.top_k to 2..{MAX_SUPPORT} beside it, or top_p to 1.0"
            " (eval.top_p is free)"
        )
    if r.top_k > MAX_SUPPORT:
        yield (
            f"rollout.top_k={r.top_k} is above {MAX_SUPPORT}, the most ids that training keeps of what a token was"
            f" sampled from; use at most {MAX_SUPPORT}, or 0 for the whole vocabulary (eval.top_k is free)"
        )
    if r.top_k == 1:
        yield "rollout.top_k=1 is greedy: its log-probs are all 0 and train nothing; use at least 2, or 0 for all"


def _mode_errors(s: Settings, mode: str) -> Iterator[str]:
    num = s.cluster.learner_processes
    if num and mode == "train" and options.learns_from_rows(s.algorithm, s.data):
        yield (
            f"cluster.learner_processes={num}: what trains on rows of data trains in the driver's process; use 0"
        )
    replay = s.rollout.replay_dir
    if mode != "train_only" and replay:
        yield f"rollout.replay_dir={replay} is read only by --mode=train_only, not by --mode={mode}; leave it empty"
    if mode == "train_only" and not replay:
        yield "rollout.replay_dir is empty; --mode=train_only trains on the saved episodes of a run directory: set it"
    elif mode == "train_only" and not (Path(replay) / "rollouts").is_dir():
        yield f"rollout.replay_dir={replay} has no directory rollouts; give a run directory with saved episodes"


def _mesh_errors(s: Settings) -> list[str]:
    plan = MeshPlan.from_settings(s.mesh, s.model)
    errors = plan.check(s.model, plan.num_devices, s.learner, s.engine)
    if s.serve.pd_balance == "auto" and 0 < len(plan.servers) < MIN_BALANCED:
        errors.append(
            f"serve.pd_balance=auto has no server to move on mesh {plan.name}, which has {len(plan.servers)}: one"
            f" prefills and one decodes always; use a mesh of at least {MIN_BALANCED} servers, or fixed"
        )
    if s.serve.affinity == "auto" and s.cluster.backend == "inproc":
        errors += _affinity_errors(s.mesh)
    return errors


def _affinity_errors(mesh: MeshSettings) -> Iterator[str]:
    decode = [pool for pool in mesh.pools if pool.kind in ("decode", "colocated")]
    classes = sorted({pool.hardware for pool in decode})
    if len(classes) < 2:
        yield (
            f"serve.affinity=auto has nothing to choose on mesh {mesh.name}, whose decode pools all have hardware"
            f" {', '.join(classes)}; give mesh.pools their hardware class, or use declared"
        )
    if tagged := [pool.name for pool in decode if pool.tags]:
        yield (
            f"serve.affinity=auto assigns tags itself, but mesh {mesh.name} declares some for {', '.join(tagged)};"
            " leave mesh.pools[].tags empty, or use declared"
        )
