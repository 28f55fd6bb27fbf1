"""May this run use this directory, and from where does it go on? Looks, decides, writes nothing.

Owns: the rules of `--resume` and `--run_dir`, and MAY_CHANGE, the keys that may differ when a run is resumed.
Invariants: a directory of another config is refused with the keys that differ, unless nothing came of the run there;
what is not a run directory is never written into. Must not: write, lock, or read into a checkpoint.
"""

import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rl_jax import schema
from rl_jax.settings import Settings

CONFIG, LOCK = "config.json", "LOCK"
PLAN = "plan.json"  # a run's own, and all that a dry run may leave where there is no run yet
CHECKPOINTS, LOGS = "checkpoints", "logs"
LEDGER, METRICS, ROLLOUTS = "ledger.jsonl", "metrics.jsonl", "rollouts"
SUMMARY = "summary.json"
RUNS = Path("runs")  # where a directory that nobody named goes

# Keys that may change when a run is resumed: how long, how often, how patient, how many hands. All others decide what
# is learned from what, so a directory with another value is another run's.
MAY_CHANGE = (
    "run_id",  # "" stands for the stored one
    "steps",
    "data.epochs",
    "data.deadline_s",
    "metrics.*",
    "checkpoint.*",
    "cluster.*",
    "model.source",  # a directory that was moved: the architecture is stored, and check_template compares tokenizers
    "model.tokenizer",
    "guards.*",
    "eval.every",
    "eval.timeout_s",
    "serve.*_deadline_s",
    "serve.progress_timeout_s",
    "weights.deadline_s",
    "weights.retries",
    "weights.max_failures",
    "weights.bucket_bytes",
    "weights.transport",
    "rollout.*_timeout_s",
    "rollout.env_workers",
    "rollout.envs_per_worker",
    "rollout.max_env_failures",
    "rollout.max_filtered_batches",
    "rollout.replay_dir",  # where the batches of a replay came from; no other mode reads it
    "rewards.*",
)

_STEP = re.compile(r"step_(\d+)")


class RunDirError(Exception):
    """The directory cannot be used as asked; one line; exit code 2."""


@dataclass(frozen=True)
class Decision:
    """What opening a directory will do."""

    path: Path
    run_id: str
    attempt: int  # 0 for the first process that works here
    resume_from: Path | None  # a directory checkpoints/step_N, here or (a fork) in another run
    changes: tuple[str, ...] = ()  # config values that differ from the stored ones, all allowed
    is_exact: bool = False  # that checkpoint and no other: a step was asked for

    @property
    def resume_step(self) -> int:
        """The version the run starts from; 0 for a fresh start."""
        return step_of(self.resume_from) if self.resume_from is not None else 0


def decide(path: Path, settings: Settings, resume: str = "auto") -> Decision:
    """Refuse, or say what will happen; writes nothing.

    resume: auto = from the last checkpoint if there is one, else from the start; never = the directory must be empty;
    strict = there must be a checkpoint; a number = of that step; a path = fork: start in this empty directory from
    another run's checkpoint. Raises RunDirError.
    """
    stored = _stored_config(path)
    if resume not in ("auto", "never", "strict") and not resume.isdecimal():
        if stored is not None:
            raise RunDirError(
                f"{path} holds a run already; a fork (--resume={resume}) needs an empty --run_dir"
            )
        return Decision(path, settings.run_id or new_id(), 0, _fork_source(Path(resume)))
    if stored is None:
        if resume not in ("auto", "never"):
            raise RunDirError(
                f"--resume={resume}: {path} holds no run to resume; use --resume=auto to start one there"
            )
        return Decision(path, settings.run_id or new_id(), 0, None)
    if resume == "never":
        raise RunDirError(
            f"{path} holds a run already; --resume=never needs an empty or new --run_dir"
        )
    steps = checkpoint_steps(path)
    changes = _check_same_run(path, stored, settings, is_blank(path, resume))
    if resume.isdecimal() and int(resume) not in steps:
        raise RunDirError(
            f"--resume={resume}: {path} has no such checkpoint; it has {steps or 'none'}"
        )
    if resume == "strict" and not steps:
        raise RunDirError(
            f"--resume=strict: {path} has no checkpoint; use --resume=auto to start again from step 0"
        )
    if not steps and (bad := sorted((path / CHECKPOINTS / "quarantine").glob("step_*"))):
        raise RunDirError(
            f"{path} has no checkpoint that can be used: {len(bad)} did not verify and lie in {bad[0].parent};"
            " start anew in another --run_dir, or delete that folder to start this one from step 0"
        )
    step = int(resume) if resume.isdecimal() else steps[-1] if steps else None
    source = None if step is None else path / CHECKPOINTS / f"step_{step}"
    attempt = _num_attempts(path)
    return Decision(path, stored["run_id"], attempt, source, changes, resume.isdecimal())


def check_eval(run_dir: str, settings: Settings, resume: str) -> None:
    """Raises RunDirError if --mode=eval would play weights that nothing trained and nobody asked for, and what decide
    raises. run_dir: "" where none was named."""
    if settings.model.source or resume == "never":
        return
    if run_dir:
        if decide(Path(run_dir), settings, resume).resume_from is not None:
            return
    elif resume not in ("auto", "strict"):
        return  # a checkpoint is named
    what = f"{run_dir} has no checkpoint" if run_dir else "no --run_dir was named"
    raise RunDirError(
        f"--mode=eval: {what}, so the weights would be random; name a run with --run_dir=DIR, a checkpoint with"
        " --resume=PATH, or a pretrained model with --config.model.source=DIR (--resume=never plays the random ones)"
    )


def checkpoint_steps(path: Path) -> list[int]:
    """Steps of <path>/checkpoints/step_N, ascending. Half-written ones have other names."""
    found = [_STEP.fullmatch(p.name) for p in (path / CHECKPOINTS).glob("step_*")]
    return sorted(int(match[1]) for match in found if match)


def auto_path(settings: Settings, root: Path = RUNS) -> tuple[Path, str]:
    """(runs/<tags>--<model>--<run id>, not there yet; the run id, a new one unless the settings name it)."""
    tags = "+".join(source.tag for source in settings.tasks.sources)
    model = f"{settings.model.family.rpartition(':')[2]}-{settings.model.num_layers}x{settings.model.embed_size}"
    while True:
        run_id = settings.run_id or new_id()
        path = root / f"{tags}--{model}--{run_id}"
        if not path.exists():
            return path, run_id
        if settings.run_id:
            raise RunDirError(
                f"{path} exists; name another run_id, or resume it with --run_dir={path}"
            )


def new_id() -> str:
    """For people and for uids; unique, and no seed ever depends on it."""
    return time.strftime("%m%d-%H%M%S-") + secrets.token_hex(2)


def encode(value: Any, indent: int | None = None) -> str:
    """The one JSON form of the run directory: ASCII, and a number that is not finite is null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stored_config(path: Path) -> dict[str, Any] | None:
    """The config a directory belongs to; None if it is absent or empty. Raises RunDirError for any other directory."""
    if not path.exists():
        return None
    if not path.is_dir():
        raise RunDirError(f"--run_dir={path} is a file; name a directory")
    if (path / CONFIG).exists():
        return stored_config(path)
    others = sorted(
        p.name for p in path.iterdir() if p.name not in (LOCK, PLAN) and p.name[0] != "."
    )
    if others:
        raise RunDirError(
            f"{path} holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} but no run;"
            " name an empty or new --run_dir"
        )
    return None


def stored_config(path: Path) -> dict[str, Any]:
    """The config.json of a run directory, every key of it known and of the right type. Raises RunDirError, which says
    that it is the stored file, and what helps."""
    file = path / CONFIG
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or not isinstance(stored.get("run_id"), str):
            raise ValueError("it is no config with a run_id")
    except (OSError, ValueError) as error:
        raise RunDirError(
            f"{file}, the stored config of a run, cannot be read ({error}); {_elsewhere(path)}"
        ) from None
    errors: list[str] = []
    schema.build(Settings, stored, "", errors)  # a key newer than the run has its default there
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise RunDirError(
            f"{file}, the stored config of a run: {errors[0]}{more}; it was edited, or is of another version of"
            " rl_jax: mend it in that file"
        )
    return stored


def check_template(path: Path, sha256: str, resume: str = "auto") -> None:
    """Raises RunDirError if the run in a directory was begun with another tokenizer or chat template than this one:
    the config names their files, which may have changed. Not where nothing came of it: no token was made with them."""
    if is_blank(path, resume):
        return
    stored = template_of(path)
    if stored is not None and stored != sha256:
        raise RunDirError(
            f"{path} was begun with the chat template {stored}, and this one is {sha256}: the files of the tokenizer"
            " were changed since (or this is another version of rl_jax); restore them, or use another --run_dir"
        )


def check_replay(path: Path, sha256: str) -> None:
    """Raises RunDirError if the run whose saved batches are to be trained on had another tokenizer or chat template:
    the ids of its traces mean other text."""
    stored = template_of(path)
    if stored is not None and stored != sha256:
        raise RunDirError(
            f"rollout.replay_dir={path} was sampled with the tokenizer and chat template {stored}, and this run has"
            f" {sha256}: its tokens would mean other text; set model.tokenizer (or model.source) and"
            " rollout.tool_parser to those of that run, restore their files, or sample anew with --mode=rollout_only"
        )


def template_of(path: Path) -> str | None:
    """The hash of tokenizer and chat template that the run in a directory was begun with; None where there is no run,
    or one that did not write it. Raises RunDirError."""
    file = path / PLAN
    if not (path / CONFIG).exists() or not file.exists():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("template_sha256")
    except (OSError, ValueError, AttributeError) as error:
        raise RunDirError(
            f"{file} cannot be read ({error}), and it says which chat template the run has; restore it, or use another"
            " --run_dir"
        ) from None


def _elsewhere(path: Path) -> str:
    """How to go on where the stored config is lost: the checkpoints and the resolved config need it not."""
    if not (path / "config.resolved.py").is_file():
        return "use another --run_dir"
    fork = f" --resume={path}" if checkpoint_steps(path) else ""
    return f"go on in a new directory with --run_dir=NEW --config={path}/config.resolved.py{fork}"


def is_blank(path: Path, resume: str) -> bool:
    """Whether a run ended here before it made anything, and starts anew: its error named another value, and that is
    what comes now."""
    return resume == "auto" and (path / CONFIG).exists() and not _has_results(path)


def _has_results(path: Path) -> bool:
    """Whether a run left more than records of how it ended: checkpoints, good or bad, saved batches, a step that
    trained, or an end that it came to (all that --mode=eval makes). The first evaluation of a run that then trained
    nothing is no result: it says how its start does, is soon made again, and is kept aside."""
    if any((path / CHECKPOINTS).glob("**/step_*")) or any((path / ROLLOUTS).glob("*/train")):
        return True
    if (path / SUMMARY).exists():
        return True
    for name, mark in ((LEDGER, '"TRAINED"'), (METRICS, '"time/step_s"')):
        with suppress(FileNotFoundError), (path / name).open(encoding="ascii") as lines:
            if any(mark in line for line in lines):
                return True
    return False


def _check_same_run(
    path: Path, stored: Mapping[str, Any], settings: Settings, may_all: bool
) -> tuple[str, ...]:
    """The allowed differences, as lines; all are where may_all. Raises RunDirError for the others."""
    before = schema.build(Settings, stored, "", [])
    old, new = schema.leaves(schema.to_tree(before)), schema.leaves(schema.to_tree(settings))
    differing = [
        f"{key} {old.get(key, 'absent')} there, {new.get(key, 'absent')} here"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not may_all and not _may_change(key)
    ]
    if settings.run_id and settings.run_id != stored["run_id"]:
        differing.insert(0, f"run_id {stored['run_id']} there, {settings.run_id} here")
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise RunDirError(
            f"{path} belongs to another config: {'; '.join(differing[:5])}{more};"
            " use the same values, or another --run_dir"
        )
    allowed = [k for k in new if old.get(k) != new[k] and k != "run_id"]
    return tuple(f"{key}: {old.get(key)} -> {new[key]}" for key in allowed)


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def checkpoint_of(path: Path) -> Path | None:
    """The checkpoint a path names: itself, or the last one of a run directory; None if there is none."""
    if _STEP.fullmatch(path.name) and path.is_dir():
        return path
    steps = checkpoint_steps(path)
    return path / CHECKPOINTS / f"step_{steps[-1]}" if steps else None


def _fork_source(source: Path) -> Path:
    checkpoint = checkpoint_of(source)
    if checkpoint is None:
        raise RunDirError(
            f"--resume={source} has no checkpoint to start from; name a run directory or its checkpoints/step_N"
        )
    return checkpoint


def step_of(checkpoint: Path) -> int:
    """N of a directory .../step_N; -1 for any other name."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def _num_attempts(path: Path) -> int:
    return 1 + max((int(p.name[8:]) for p in (path / LOGS).glob("attempt_*")), default=-1)
