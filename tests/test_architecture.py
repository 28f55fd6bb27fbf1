"""The house's structure as tests: who may import whom, README tree = disk, sizes, nothing declared without use."""

import ast
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rl_jax import schema
from rl_jax.metrics import METRICS, unknown_names
from rl_jax.validate import CHOICES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rl_jax", "kernels", "envs", "mesh_configs")

# Part -> row. A part imports only from lower rows and from itself. Parts of one row that belong together have one name.
ROWS = {
    "notebook": 8,
    "tools": 7,
    "launch": 6,
    "driver": 5,
    "config": 5,
    "cluster": 5,
    "testing": 5,
    "weights": 4,
    "http": 4,
    "viewer": 4,
    "remote": 4,
    "checkpoint": 4,
    "simulate": 4,
    "serving": 3,
    "learner": 3,
    "rollout": 3,
    "models": 2,
    "algorithms": 2,
    "rewards": 2,
    "data": 2,
    "mesh": 1,
    "tokens": 1,
    "metrics": 1,
    "ledger": 1,
    "run_dir": 1,
    "backend": 1,
    "sandbox": 0,
    "envs": 1,
    "mesh_configs": 1,
    "records": 0,
    "kernels": 0,
}

# Files and folders of rl_jax/ whose part has another name than theirs.
PART = {
    name: part
    for part, names in {
        "records": (
            "types clock waits asgi exposition inert strict_json disk lowering settings settings_watch "
            "timeline schema __init__"
        ),
        "serving": "engine serve",
        "config": (
            "config overrides validate validate_cluster validate_rewards validate_watch "
            "role_source model_source configs names"
        ),
        "metrics": "progress live_view advice trackers exporter",
        "backend": "signals child",
        "cluster": "ray_cluster",
        "run_dir": "run_dir console control resume",
        "driver": "driver recorder first_step profiling guards steering warm_start",
        "launch": (
            "job wiring outset serving learning watching learner_process exit_codes dry_run "
            "plan_record pool_facts build_roles preflight preflight_cluster "
            "preflight_model supervised start report launch"
        ),
    }.items()
    for name in names.split()
}

# Third-party packages that only some parts may import, by the reason of design: one place each.
ONLY_IN = {
    "ray": {"rl_jax/ray_cluster.py"},
    "safetensors": {"rl_jax/models/hf_files.py", "rl_jax/tools/conversion.py"},
    "gguf": {"rl_jax/models/gguf.py"},
    "tokenizers": {"rl_jax/tokens", "rl_jax/models/gguf_tokens.py"},
    "orbax": {"rl_jax/checkpoint.py"},
    "jetstream": {"rl_jax/serve/jetstream.py"},
    "optax": {"rl_jax/learner"},
    "grain": {"rl_jax/rollout", "rl_jax/data"},
    "gymnasium": {"envs"},
    "textarena": {"envs/textarena.py"},
    "reasoning_gym": {"envs"},
    "ml_collections": {"rl_jax/config.py", "rl_jax/overrides.py", "rl_jax/configs", "mesh_configs"},
    "rich": {"rl_jax/live_view.py"},
    "tensorboardX": {"rl_jax/trackers/tensorboard.py"},
    **{name: {f"rl_jax/trackers/{name}.py"} for name in ("wandb", "mlflow")},
    "matplotlib": {"rl_jax/notebook/plot.py"},
    "jsonschema": {"rl_jax/rewards/json_schema.py"},
    "math_verify": {"rl_jax/rewards/math_answer.py"},
    "uvicorn": {"rl_jax/tools/reward_server.py", "rl_jax/http/server.py"},
    "fastapi": {"rl_jax/http/app.py"},
    "starlette": {"rl_jax/http/app.py"},
    "pydantic": {"rl_jax/http/schemas.py", "rl_jax/http/admin.py"},
    "psutil": {"rl_jax/rollout", "rl_jax/cluster.py", "rl_jax/run_dir.py"},
}

# Checked before jax is loaded, or run in processes that never load it.
NO_JAX = (
    "rl_jax/__init__.py", "rl_jax/clock.py", "rl_jax/timeline.py", "rl_jax/inert.py",
    "rl_jax/types.py", "rl_jax/settings.py", "rl_jax/settings_watch.py", "rl_jax/schema.py", "rl_jax/config.py",
    "rl_jax/overrides.py", "rl_jax/validate.py", "rl_jax/validate_cluster.py", "rl_jax/validate_rewards.py",
    "rl_jax/validate_watch.py", "rl_jax/role_source.py", "rl_jax/resume.py", "rl_jax/model_source.py",
    "rl_jax/run_dir.py", "rl_jax/console.py", "rl_jax/disk.py", "rl_jax/metrics.py", "rl_jax/progress.py",
    "rl_jax/trackers", "rl_jax/live_view.py", "rl_jax/tools/steer.py", "rl_jax/exporter.py", "rl_jax/advice.py",
    "rl_jax/trackers", "rl_jax/live_view.py", "rl_jax/tools/steer.py", "rl_jax/exporter.py", "rl_jax/advice.py",
    "rl_jax/signals.py", "rl_jax/tokens", "rl_jax/ledger.py", "rl_jax/backend.py", "rl_jax/launch.py",
    "rl_jax/outset.py", "rl_jax/mesh/plan.py", "rl_jax/child.py",
    "rl_jax/mesh/plan.py", "rl_jax/child.py", "rl_jax/tools/doctor.py",
    "rl_jax/sandbox",
    "rl_jax/configs", "rl_jax/rewards", "rl_jax/rollout", "rl_jax/data", "rl_jax/algorithms/__init__.py",
    "rl_jax/algorithms/options.py", "rl_jax/models/__init__.py", "rl_jax/models/features.py",
    "rl_jax/models/hf_config.py", "rl_jax/models/hf_keys.py", "rl_jax/tools/convert.py",
    "rl_jax/tools/fetch_smollm2.py", "rl_jax/tools/check_env.py", "rl_jax/tools/env_checks.py",
    "rl_jax/tools/reward_server.py", "rl_jax/tools/serve.py", "rl_jax/tools/trace.py", "rl_jax/http",
    "rl_jax/viewer", "rl_jax/tools/view.py",
    "rl_jax/notebook", "rl_jax/tools/replay.py", "rl_jax/tools/recorded.py",
    "envs", "mesh_configs",
)  # fmt: skip

MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 100
MAX_PARAMETERS = 7  # positional ones, self aside; keyword-only ones are named where they are given
WIDE = {  # functions with more, and why
    "rl_jax/engine/programs.py:extend": "traced once; each argument is one array of the packed chunk",
    "rl_jax/weights/plan.py:build": "both sides of the sync, as the caller holds them",
    "rl_jax/wiring.py:_live_parts": "wires the parts of one job, called once",
}


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders or PACKAGES for p in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def part_of(module: str) -> str | None:
    """The part a dotted module of ours belongs to; None for third-party and standard modules."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    if parts[0] != "rl_jax":
        return parts[0]
    return PART.get(parts[1], parts[1]) if len(parts) > 1 else "records"


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """(dotted module, line) of every import, those inside functions and for the type checker included."""
    out: list[tuple[str, int]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            out += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{name_of(path)}:{node.lineno}: relative import; write the full name"
            )
            own = node.module == "rl_jax"  # from rl_jax import x: x is the module
            out += [
                (f"{node.module}.{a.name}" if own else str(node.module), node.lineno)
                for a in node.names
            ]
    return tuple(out)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


# --- who may import whom -------------------------------------------------------------------------------------------


def test_every_file_belongs_to_a_part_of_the_table():
    unknown = {name_of(p) for p in sources() if part_of(module_of(p)) not in ROWS}
    assert unknown == set(), "give each a row in tests/test_architecture.py"


@pytest.mark.slow
def test_imports_only_go_down():
    bad = []
    for path in sources():
        here = part_of(module_of(path))
        for module, line in imports(path):
            there = part_of(module)
            if there is not None and there != here and ROWS[there] >= ROWS[here]:
                bad.append(
                    f"{name_of(path)}:{line}: {here} (row {ROWS[here]}) imports {module} (row {ROWS[there]})"
                )
    assert bad == []


def test_environments_know_the_records_only():
    allowed = ("rl_jax.types", "rl_jax.sandbox", "envs")
    bad = [
        f"{name_of(p)}:{line}: {module}"
        for p in sources("envs")
        for module, line in imports(p)
        if module.split(".")[0] in PACKAGES and not module.startswith(allowed)
    ]
    assert bad == []


def test_kernels_and_mesh_configs_know_nothing_of_ours():
    for folder in ("kernels", "mesh_configs"):
        for path in sources(folder):
            ours = [
                m
                for m, _ in imports(path)
                if m.split(".")[0] in PACKAGES and m.split(".")[0] != folder
            ]
            assert ours == [], name_of(path)


@pytest.mark.slow
def test_nothing_imports_launch():
    bad = [name_of(p) for p in sources() for m, _ in imports(p) if m == "rl_jax.launch"]
    assert bad == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_library_has_one_place(package):
    bad = [
        f"{name_of(path)}:{line}"
        for path in sources()
        for module, line in imports(path)
        if module.split(".")[0] == package
        and not any(name_of(path).startswith(w) for w in ONLY_IN[package])
    ]
    assert bad == []


def _module_level_imports(path: Path) -> Iterator[str]:
    """Modules that importing the file imports, one level deep; blocks for the type checker aside."""
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def _reaches_jax(path: Path, seen: set[Path]) -> list[str] | None:
    """The chain of files through which importing `path` imports jax or flax."""
    if path in seen:
        return None
    seen.add(path)
    for module in _module_level_imports(path):
        if module.split(".")[0] in ("jax", "flax", "jaxtyping", "optax", "orbax"):
            return [name_of(path)]
        parts = module.split(".")
        for end in range(1, len(parts) + 1):  # importing a.b.c imports a and a.b
            there = _file_of(".".join(parts[:end])) if parts[0] in PACKAGES else None
            if there is not None and (chain := _reaches_jax(there, seen)) is not None:
                return [name_of(path), *chain]
    return None


@pytest.mark.parametrize("where", NO_JAX)
def test_file_is_importable_without_jax(where):
    for path in sources(where) if (ROOT / where).is_dir() else [ROOT / where]:
        assert (chain := _reaches_jax(path, set())) is None, (
            f"imports jax through {' -> '.join(chain)}"
        )


def test_import_rl_jax_is_fast_and_does_no_work():
    code = (
        "import sys, time; before = set(sys.modules); t = time.perf_counter()\n"
        "import rl_jax; t = time.perf_counter() - t\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(t, sorted(new - {'rl_jax'} - set(sys.stdlib_module_names)))"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    seconds, new = done.stdout.split(" ", 1)
    assert new.strip() == "[]"
    assert float(seconds) < 0.3, f"of {time.monotonic() - start:.1f} s with the interpreter's start"


# --- the README's tree ---------------------------------------------------------------------------------------------


def readme_tree() -> dict[str, str]:
    """path -> purpose, of the README's block that starts with `rl_jax/`; children are indented by two spaces."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(
        b for b in re.findall(r"```[a-z]*\n(.*?)```", text, re.S) if b.startswith("rl_jax/")
    )
    out: dict[str, str] = {}
    parents: list[str] = []
    for line in filter(str.strip, block.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        names, _, purpose = line.strip().partition("  ")
        parents = parents[:depth]
        for name in names.split():
            path = "".join(parents) + name
            assert path not in out, f"{path} stands twice in the README's tree"
            out[path] = purpose.strip()
        parents.append(names.split()[0])
    return out


@cache
def tracked() -> list[str]:
    """Files of the repository; without git (an unpacked archive) all that is not hidden or made by a tool."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return [line for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    files = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            f
            for f in folders
            if f[0] != "." and f not in ("__pycache__", "runs") and "egg-info" not in f
        ]
        files += [name_of(Path(folder) / name) for name in names if name[0] != "."]
    return files


def test_readme_lists_what_exists():
    missing = [path for path in readme_tree() if not (ROOT / path).exists()]
    assert missing == [], "these stand in the README's tree and not on the disk"


def test_readme_lists_every_file_or_its_folder():
    """A folder that stands there without children answers for its files; one with children lists them all."""
    listed = set(readme_tree())
    opened = {str(Path(path).parent) + "/" for path in listed}
    unlisted = set()
    for file in tracked():
        parts = Path(file).parts
        if parts[0].startswith(".") or parts[-1] == "__init__.py":
            continue
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end]) + ("/" if end < len(parts) else "")
            if path in listed and path not in opened:
                break  # the folder answers, or the file itself is there
            if path not in listed:
                unlisted.add(path)
                break
    assert unlisted == set(), "add them to the README's tree, with their purpose"


def test_readme_gives_every_entry_a_purpose():
    assert [path for path, purpose in readme_tree().items() if not purpose] == []


# --- sizes and shapes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_and_functions_stay_readable():
    bad = []
    for path in sources(*PACKAGES, "tests"):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines >= MAX_FILE_LINES:
            bad.append(f"{name_of(path)} has {num_lines} lines")
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                named = [
                    a.arg
                    for a in (*node.args.posonlyargs, *node.args.args)
                    if a.arg not in ("self", "cls")
                ]
                if lines >= MAX_FUNCTION_LINES:
                    bad.append(f"{name_of(path)}:{node.lineno}: {node.name} has {lines} lines")
                if (
                    len(named) >= MAX_PARAMETERS
                    and f"{name_of(path)}:{node.name}" not in WIDE
                    and path.is_relative_to(ROOT / "rl_jax")
                ):
                    bad.append(
                        f"{name_of(path)}:{node.lineno}: {node.name} has {len(named)} parameters"
                    )
    assert bad == []


def test_every_module_says_what_it_is():
    bad = [name_of(p) for p in sources() if p.stat().st_size and not ast.get_docstring(tree_of(p))]
    assert bad == []


FORBIDDEN = {
    "a path of one machine": re.compile(r"/(?:work|home|root|Users|opt)/[\w.]"),
    "a number of an issue": re.compile(r"\bissue #?\d+\b", re.I),
    "a stub": re.compile(r"\bNotImplementedError\b|raise NotImplemented\b"),
    "failure hidden": re.compile(
        r"except (?:Base)?Exception(?: as \w+)?:\s*(?:#[^\n]*)?\n\s*(?:pass|continue)\b|except:\s"
    ),
    "a random seed shared by all": re.compile(r"\b(?:np|numpy)\.random\.seed\(|(?<![\w.])random\.seed\("),
    "a mocked part": re.compile(r"\bmock\.patch\b|unittest\.mock"),
}  # fmt: skip


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    own = Path(__file__).name
    bad = []
    for name in tracked():
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".toml", "")
            and path.name != own
            and path.stat().st_size < 1_000_000
        ):
            text = path.read_text(encoding="utf-8", errors="replace")
            bad += [
                f"{name}:{text[: m.start()].count(chr(10)) + 1}: {m[0]!r}"
                for m in FORBIDDEN[what].finditer(text)
            ]
    assert bad == []


def test_wall_clock_is_for_people_only():
    """Deadlines and durations use the monotonic clock; these write a time for a person to read."""
    people = ("metrics", "run_dir", "control", "http/api", "viewer/run")
    allowed = {f"rl_jax/{name}.py" for name in (*people, "testing/generated_run")}
    bad = {
        name_of(p)
        for p in sources()
        if re.search(r"\btime\.time\(\)|datetime\.now", p.read_text(encoding="utf-8"))
    }
    assert bad <= allowed


def test_environment_variables_are_read_at_the_edge_only():
    edges = ("backend", "launch", "job", "child")
    allowed = {f"rl_jax/{name}.py" for name in (*edges, "trackers/mlflow")}  # MLflow asks for it
    pattern = re.compile(r"\bos\.(?:environ|getenv|putenv)")
    bad = {name_of(p) for p in sources() if pattern.search(p.read_text(encoding="utf-8"))}
    assert {b for b in bad if not b.startswith("rl_jax/testing/")} <= allowed


# --- nothing declared without a use --------------------------------------------------------------------------------


def attributes_read() -> set[str]:
    skip = (
        "rl_jax/settings.py",
        "rl_jax/settings_watch.py",
        "rl_jax/validate.py",
        "rl_jax/configs",
        "mesh_configs",
        "rl_jax/testing",
    )
    return {
        node.attr
        for path in sources()
        if not name_of(path).startswith(skip)
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
    }


def test_every_setting_is_read_somewhere():
    read = attributes_read()
    one_value = {key for key, choices in CHOICES.items() if len(choices) == 1}
    unread = {key for key in schema.leaf_keys() if key.rsplit(".", 1)[-1] not in read} - one_value
    assert unread == set(), (
        "a key nobody reads is a flag that is silently ignored: use it or delete it"
    )


def strings_of(path: Path) -> Iterator[str]:
    """String literals; the fields of an f-string become {}."""
    whole = [n for n in nodes_of(path) if isinstance(n, ast.JoinedStr)]
    pieces = {id(value) for joined in whole for value in joined.values}
    for joined in whole:
        yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in joined.values)
    for node in nodes_of(path):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in pieces
        ):
            yield node.value


@cache
def metric_strings() -> frozenset[tuple[str, str]]:
    """(file, text) of every literal that reads like a metric's name."""
    areas = {name.split("/")[0] for name in METRICS}
    shape = re.compile(r"[a-z]+/[a-z{][a-z0-9_{}.]*")
    return frozenset(
        (name_of(path), text)
        for path in sources()
        if path.name != "metrics.py"
        for text in strings_of(path)
        if shape.fullmatch(text) and text.split("/")[0] in areas
    )


def names_meant(text: str) -> set[str]:
    """Names of the table that a literal with {} can become."""
    pattern = re.compile(re.escape(text).replace(r"\{\}", r"[\w{}.]*"))
    return {name for name in METRICS if pattern.fullmatch(name) or pattern.fullmatch(f"{name}.x")}


def test_metric_names_in_the_source_are_in_the_table():
    bad = [
        (where, text)
        for where, text in metric_strings()
        if unknown_names([text]) and not names_meant(text)
    ]
    assert sorted(bad) == []


def test_metric_table_has_no_name_that_nobody_writes():
    # Advice reads figures: what it names is not written by that.
    written = {text for where, text in metric_strings() if where != "rl_jax/advice.py"}
    named = {text.split(".")[0] for text in written if "{}" not in text.split(".")[0]}
    meant = {name for text in written if "{}" in text for name in names_meant(text)}
    assert sorted(set(METRICS) - named - meant) == []


DISTRIBUTION = {"ml_collections": "ml-collections", "absl": "absl-py", "reasoning_gym": "reasoning-gym",
                "orbax": "orbax-checkpoint"}  # fmt: skip


# Imported by one file each, and told where they are missing.
EXTRAS = {"jetstream": "google-jetstream", "ray": "ray", "rich": "rich", "jsonschema": "jsonschema",
          "math_verify": "math-verify", "textarena": "textarena", "uvicorn": "uvicorn",
          "wandb": "wandb", "mlflow": "mlflow-skinny"}  # fmt: skip
# Extras of several packages.
TOGETHER = {
    "serve": ("fastapi", "pydantic", "starlette", "uvicorn"),
    "tensorboard": ("tensorboardX",),
    "notebook": ("ipykernel", "matplotlib"),
}


def test_dependencies_are_what_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[ ]", d)[0] for d in project["dependencies"]}
    for module, package in EXTRAS.items():
        (asked,) = project["optional-dependencies"][module]
        assert re.split(r"[<>=\[ ]", asked)[0] == package
    for extra, packages in TOGETHER.items():
        asked = project["optional-dependencies"][extra]
        assert tuple(re.split(r"[<>=\[ ]", one)[0] for one in asked) == packages
    imported = {module.split(".")[0] for path in sources() for module, _ in imports(path)}
    extras = {*EXTRAS, *(package for packages in TOGETHER.values() for package in packages)}
    third_party = {m for m in imported if m not in sys.stdlib_module_names and m not in PACKAGES}
    assert {DISTRIBUTION.get(m, m) for m in third_party - extras} == declared
