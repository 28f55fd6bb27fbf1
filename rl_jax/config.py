"""The command line and the config file -> Settings. Everything is checked here, before jax is imported.

Owns: `parse` (argv -> Parsed), `default_config` (what a config file starts from), and the forms in which a config is
stored. Beside it: schema.py (types), overrides.py (`--config.a.b=value`), validate.py (rules about values).
Life of a config: 1 `default_config()` takes every default from the dataclasses of settings.py. 2 The config file's
`get_config(arg)` changes some; FieldReferences let one value follow another. 3 `--mesh` replaces its mesh. 4 Overrides
are set in the order given, wherever they stand on the command line, so that references follow them. 5 The tree is
resolved and built into the frozen `Settings`. 6 A model's source gives its architecture, a tokenizer of "" becomes the
one that it stands for, and validate.py looks at all values together. 7 A 0 that stands for a value of another section
is replaced by it.
Errors of all steps are collected and raised once, as ConfigError with one line each.
Must not: import jax, touch the disk beyond reading config files, or let a word of the command line go unused.
"""

import difflib
import importlib.util
import inspect
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rl_jax import schema
from rl_jax.algorithms.options import learns_from_rows, passed_over, resolved
from rl_jax.console import say
from rl_jax.model_source import with_source
from rl_jax.overrides import Override, parse_overrides, resolve
from rl_jax.resume import CONFIG, RunDirError, stored_config
from rl_jax.settings import MeshSettings, Settings
from rl_jax.tokens import TOKENIZERS
from rl_jax.validate import MODES, check, foreign_packages

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "rl_jax/configs/quickstart.py"

USAGE = f"""usage: python -m rl_jax.launch [--config=FILE.py[:arg]] [--config.a.b=value ...] [--mesh=FILE.py[:arg]]
                              [--mode={"|".join(MODES)}] [--run_dir=DIR]
                              [--resume=auto|never|strict|STEP|PATH] [--progress=rich|plain|json|none] [--dry_run]

  --config     the experiment; a file or a name of rl_jax/configs
               (default: the config of the run in --run_dir if it holds one, else quickstart)
  --config.a.b one value of it, e.g. --config.learner.learning_rate=3e-4 --config.tasks.sources[0].config.num_maps=32
  --mesh       replaces its mesh; a file or a name of mesh_configs, e.g. --mesh=split_8
  --mode       train; eval: only evaluate; rollout_only: sample and save episodes; train_only: train on saved ones
  --run_dir    where everything of the run goes (default: a new directory under runs/)
  --resume     auto: go on from the last checkpoint if there is one; never; strict: it must be there; STEP; PATH: fork
  --dry_run    check everything: the plan, the disk, an episode and the first prompts of each task source, and that each
               program can be traced, on simulated devices; train nothing"""

FLAGS = ("config", "mesh", "mode", "run_dir", "resume", "progress", "dry_run", "help")


class ConfigError(ValueError):
    """What is wrong with the command line or the config, one line each; exit code 2."""

    def __init__(self, errors: Sequence[str]):
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)


@dataclass(frozen=True)
class LaunchOptions:
    mode: str = "train"
    dry_run: bool = False
    run_dir: str = ""  # "" = a new directory under runs/
    resume: str = "auto"
    config_file: str = ""  # "" = that of a run directory that holds a run, else the quickstart
    mesh_file: str = ""
    overrides: tuple[str, ...] = ()  # as given, for the record


@dataclass(frozen=True)
class Parsed:
    settings: Settings
    options: LaunchOptions
    # keys typed beside another algorithm than the file's; None = the file's own
    chosen: frozenset[str] | None = None


def parse(argv: Sequence[str]) -> Parsed:
    """argv: the words after the program's name. Raises ConfigError; prints the usage and exits 0 for --help."""
    errors: list[str] = foreign_packages(ROOT)
    if errors:  # its tables would be read from the wrong place
        raise ConfigError(errors)
    options, overrides = _split_argv(argv, errors)
    stored = Path(options.run_dir) / CONFIG
    is_stored = not options.config_file and bool(options.run_dir) and stored.is_file()
    if options.config_file:
        config = _load(options.config_file, ROOT / "rl_jax" / "configs", errors)
    elif is_stored:
        config = _load_stored(stored.parent, errors)
        if config is not None and options.mode != "train_only" and "rollout" in config:
            config.rollout.replay_dir = ""  # of a replay here; no other mode reads it
    else:
        config = _load(QUICKSTART, ROOT / "rl_jax" / "configs", errors)
    if options.mesh_file:
        mesh = _load(options.mesh_file, ROOT / "mesh_configs", errors)
        if mesh is not None and config is not None:
            with config.unlocked(), config.ignore_type():
                config.mesh = mesh
    if config is None:
        raise ConfigError(errors)
    tree = resolve(config, parse_overrides(overrides, errors), errors)
    settings = _with_source(schema.build(Settings, tree, "", errors), errors)
    told = {error.split("=")[0] for error in errors}
    typed = {key for key, _ in overrides}
    # A file is written for the algorithm that it names; another one was named over it, or is stored with its values.
    chosen = frozenset(typed) if is_stored or "algorithm.name" in typed else None
    checked = replace(settings, algorithm=passed_over(settings.algorithm, chosen))
    found = check(checked, options.mode)
    found = [e for e in found if e.split("=")[0] not in told]
    if is_stored:  # nobody typed these values
        found = [e if e.split("=")[0] in typed else f"{e} (it stands in {stored})" for e in found]
    errors += found
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)))
    if is_stored:  # what a run has stored stays, or it were another config
        return Parsed(filled(settings), options)
    return Parsed(filled(checked), options, chosen)


def plays_episodes(parsed: Parsed) -> bool:
    """Whether the run needs the environments: not to train on saved episodes, nor on rows of a file."""
    settings, mode = parsed.settings, parsed.options.mode
    reads = mode == "train" and learns_from_rows(settings.algorithm, settings.data)
    return mode != "train_only" and not (reads and settings.data.path)


def filled(settings: Settings) -> Settings:
    """None becomes the algorithm's own value, a 0 that stands for a value of another section that value, and a
    directory's path absolute.

    Here, and again where a plugin's own values are known (job.py): what a run stores and a part sees is resolved, and a
    part sees its own section.
    """
    algorithm = resolved(settings.algorithm)
    if algorithm.aggregation == "seq-mean-token-sum-norm" and not algorithm.max_response_tokens:
        algorithm = replace(algorithm, max_response_tokens=settings.engine.context)
    model, name = settings.model, settings.model.tokenizer
    if name and name not in TOKENIZERS and Path(name).is_dir():
        model = replace(model, tokenizer=str(Path(name).absolute()))
    return replace(settings, algorithm=algorithm, model=model)


def _with_source(settings: Settings, errors: list[str]) -> Settings:
    """Before the checks, which look at the architecture and compare tokenizers: the source's, or byte without one."""
    model = settings.model
    try:
        model = with_source(model)
    except ValueError as error:
        errors += str(error).splitlines()
    tokenizer = model.tokenizer or model.source or "byte"
    return replace(settings, model=replace(model, tokenizer=tokenizer))


def load_mesh(spec: str) -> MeshSettings:
    """The mesh of FILE.py[:arg], or of a name of mesh_configs. Raises ConfigError."""
    errors: list[str] = []
    config = _load(spec, ROOT / "mesh_configs", errors)
    if config is None:
        raise ConfigError(errors)
    whole = default_config()
    with whole.unlocked(), whole.ignore_type():
        whole.mesh = config
    settings = schema.build(Settings, resolve(whole, [], errors), "", errors)
    if errors:
        raise ConfigError(errors)
    return settings.mesh


def default_config() -> ConfigDict:
    """Every default of settings.py, locked: a typo in a config file fails at its line. Free mappings stay open."""
    return _section(Settings).lock()


def resolved_python(settings: Settings) -> str:
    """A config file that gives exactly these settings, for `--config=RUN/config.resolved.py`."""
    body = [
        f"    config.{key} = {_sections(value)}"
        for key, value in schema.to_tree(settings).items()
        if not isinstance(value, Mapping)
    ]
    for section, values in schema.to_tree(settings).items():
        if isinstance(values, Mapping):
            body += [f"    config.{section}.{key} = {_sections(v)}" for key, v in values.items()]
    head = '"""The resolved config of a run, written by it."""\n\nfrom ml_collections import ConfigDict\n\n'
    head += "from rl_jax.config import default_config\n\n\n"
    return (
        head
        + "def get_config():\n    config = default_config()\n"
        + "\n".join(body)
        + "\n    return config\n"
    )


def resolved_json(settings: Settings) -> str:
    return json.dumps(schema.to_tree(settings), indent=1, allow_nan=False) + "\n"


# --- the command line ----------------------------------------------------------------------------------------------


def _split_argv(argv: Sequence[str], errors: list[str]) -> tuple[LaunchOptions, list[Override]]:
    """Flags and (dotted key, text) overrides; `--flag value` and `--flag=value` are the same."""
    chosen: dict[str, str] = {}
    overrides: list[Override] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("-") or name in ("-", "--"):
            errors.append(_stray(word))
            continue
        name = name.lstrip("-").replace("-", "_") if "." not in name else name.lstrip("-")
        value: str | None = text if equals else None
        takes_next = (
            value is None and name not in ("dry_run", "help") and words and words[0][:2] != "--"
        )
        if name.startswith("config."):
            value = words.pop(0) if takes_next else value
            overrides.append((name.removeprefix("config."), value))
        elif name not in FLAGS and name != "h":
            errors.append(_unknown_flag(name, text if equals else ""))
        elif name in ("help", "h"):
            say(USAGE)
            raise SystemExit(0)
        else:
            value = words.pop(0) if takes_next else value
            value = value or ("true" if name == "dry_run" and value is None else "")
            if not value:
                errors.append(f"--{name} needs a value: --{name}=...")
            elif chosen.setdefault(name, value) != value:
                errors.append(
                    f"--{name}={chosen[name]} and --{name}={value} are both there; keep one"
                )
    if "progress" in chosen:
        overrides.append(("metrics.progress", chosen.pop("progress")))
    return _options(chosen, overrides, errors), overrides


def _options(
    chosen: Mapping[str, str], overrides: Sequence[Override], errors: list[str]
) -> LaunchOptions:
    mode, dry_run = chosen.get("mode", "train"), chosen.get("dry_run", "false").lower()
    if mode not in MODES:
        errors.append(f"--mode={mode} is not one of {', '.join(MODES)}")
        mode = "train"
    if dry_run not in ("true", "false", "1", "0"):
        errors.append(f"--dry_run={dry_run} must be true or false")
    resume = chosen.get("resume", "auto")
    if (
        resume not in ("auto", "never", "strict")
        and not resume.isdecimal()
        and not Path(resume).is_dir()
    ):
        errors.append(
            f"--resume={resume} is neither auto, never, strict, a step, nor a directory that exists"
        )
    return LaunchOptions(
        mode=mode,
        dry_run=dry_run in ("true", "1"),
        run_dir=chosen.get("run_dir", ""),
        resume=resume,
        config_file=chosen.get("config", ""),
        mesh_file=chosen.get("mesh", ""),
        overrides=tuple(f"{key}={text}" for key, text in overrides),
    )


def _stray(word: str) -> str:
    name = word.partition("=")[0]
    if name.removeprefix("config.") in set(schema.leaf_keys()):
        return f"stray word {word!r}; did you mean --config.{word.removeprefix('config.')}?"
    return f"stray word {word!r}; every word is a --flag, --flag=value or --config.key=value; see --help"


def _unknown_flag(name: str, text: str) -> str:
    known = [f"config.{key}" for key in schema.leaf_keys()]
    near = difflib.get_close_matches(name, FLAGS, 2, cutoff=0.6)
    near += [key for key in known if key.rsplit(".", 1)[-1] == name or key == f"config.{name}"]
    near += difflib.get_close_matches(name, known, 2, cutoff=0.75)
    near = list(dict.fromkeys(near))[:3]
    if not near:
        return f"unknown flag --{name}; the flags are {', '.join(f'--{flag}' for flag in FLAGS)}"
    ending = f"={text}" if text else ""
    return f"unknown flag --{name}; did you mean {', '.join(f'--{n}{ending}' for n in near)}?"


# --- config files --------------------------------------------------------------------------------------------------


def _load(spec: str, library: Path, errors: list[str]) -> ConfigDict | None:
    """The ConfigDict of FILE.py[:arg]; FILE is looked for from here, then from the repository, then in `library`."""
    name, _, arg = spec.partition(":")
    tried = [Path(name), ROOT / name, library / (name if name.endswith(".py") else f"{name}.py")]
    path = next((p for p in tried if p.suffix == ".py" and p.is_file()), None)
    if path is None:
        there = ", ".join(sorted(p.stem for p in library.glob("*.py") if p.stem != "__init__"))
        what = f"{name} is no .py file" if Path(name).exists() else f"no config file {name}"
        errors.append(f"{what}; {library.name} holds: {there or 'nothing'}")
        return None
    module_spec = importlib.util.spec_from_file_location(f"config_file_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        config = _call_get_config(module, arg)
    except Exception as error:  # boundary: whatever a config file does wrong is one line
        errors.append(_file_error(path, error))
        return None
    if not isinstance(config, ConfigDict):
        errors.append(
            f"{path}: get_config() returned a {type(config).__name__}; it must return a ConfigDict"
        )
        return None
    return config


def _load_stored(run_dir: Path, errors: list[str]) -> ConfigDict | None:
    """The config a run directory keeps: data, so that going on with a run needs no config file."""
    try:
        return ConfigDict(stored_config(run_dir), type_safe=False)
    except RunDirError as error:
        errors.append(str(error))
        return None


def _call_get_config(module: Any, arg: str) -> Any:
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ValueError("it has no get_config() function")
    takes_arg = bool(inspect.signature(get_config).parameters)
    if arg and not takes_arg:
        raise ValueError(f"its get_config() takes no argument, but :{arg} was given")
    needs_arg = any(p.default is p.empty for p in inspect.signature(get_config).parameters.values())
    if needs_arg and not arg:
        raise ValueError("its get_config(arg) needs an argument: FILE.py:arg")
    return get_config(arg) if arg else get_config()


def _file_error(path: Path, error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    text = _no_such_key(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{path}{f':{line}' if line else ''}: {text}"


def _no_such_key(error: Exception) -> str:
    """The line about a key that a section of the config does not have, as of the command line; "" for other errors."""
    if not isinstance(error, (AttributeError, KeyError)):
        return ""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        section = frame.f_locals.get("self")
        name = frame.f_locals.get("key", frame.f_locals.get("attribute"))
        if isinstance(section, _OpenDict) or not isinstance(section, ConfigDict):
            continue
        if isinstance(name, str) and name not in section:
            names = list(section)
            alike = [key for key, known in schema.sections() if known == set(names)]
            return schema.unknown_key(alike[0] if len(alike) == 1 else "", name, names)
    return ""


def _section(cls: type, given: Any = None) -> ConfigDict:
    """The dataclass `cls` (or the instance `given`) as a ConfigDict. Types are checked by schema.build, all at once."""
    instance = cls() if given is None else given
    out = ConfigDict(type_safe=False)
    for f in fields(cls):
        value = getattr(instance, f.name)
        if is_dataclass(value):
            out[f.name] = _section(type(value), value)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            out[f.name] = [_section(type(v), v) for v in value]
        elif isinstance(value, Mapping):
            out[f.name] = _OpenDict(dict(value), type_safe=False)
        else:
            out[f.name] = value
    return out


class _OpenDict(ConfigDict):
    """A mapping whose keys belong to somebody else (an environment), so a lock leaves it open."""

    def lock(self):
        return self


def _sections(value: Any) -> str:
    """Source text of a value, its mappings as ConfigDicts so that overrides reach into them."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key!r}: {_sections(v)}" for key, v in value.items())
        return f"ConfigDict({{{inner}}}, type_safe=False)"
    if isinstance(value, tuple) and value and isinstance(value[0], Mapping):
        return "[" + ", ".join(_sections(v) for v in value) + "]"
    return repr(value)
