"""`--config.a.b=value`: where the key leads, what value the text is, and how it meets the config file's references.

Owns: the grammar `a.b[0].c=text`, and the resolution of a ConfigDict into plain dicts. Invariants: a key is looked up
in the settings' dataclasses before anything is set; a value is set twice, in the ConfigDict so that FieldReferences
follow it, and in the resolved tree because a config file need not hold every key.
Must not: know which values are allowed (validate.py).
"""

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from rl_jax import schema
from rl_jax.settings import Settings

REQUIRED = "<required>"  # what a config file writes where the command line must give the value

Override = tuple[str, str | None]  # dotted key, text (None: the flag stood alone)
Path = tuple[str | int, ...]

_PART = re.compile(r"([A-Za-z_][\w-]*)((?:\[\d+\])*)")


class _NoSuchKey(Exception):
    """Internal: its text is the error line."""


def parse_overrides(overrides: Sequence[Override], errors: list[str]) -> list[tuple[Path, Any]]:
    """(path, value) of each override whose key exists and whose text has the right type; the others become errors, and
    so do two values of one key."""
    out: list[tuple[Path, Any]] = []
    given: dict[Path, tuple[str, Any]] = {}  # what was typed, and its value
    for key, text in overrides:
        try:
            path = _split(key)
            annotation = _annotation(path)
            if text is None and annotation is not bool:
                raise _NoSuchKey(f"--config.{key} needs a value: --config.{key}=...")
        except _NoSuchKey as error:
            errors.append(str(error))
            continue
        num_errors = len(errors)
        value = schema.parse_value("true" if text is None else text, annotation, key, errors)
        if len(errors) > num_errors:
            continue
        typed = f"{key}={'true' if text is None else text}"
        before, same = given.setdefault(path, (typed, value))
        if same != value:
            errors.append(f"{before} and {typed} are both on the command line; keep one")
        out.append((path, value))
    return out


def resolve(
    config: ConfigDict, values: Sequence[tuple[Path, Any]], errors: list[str]
) -> dict[str, Any]:
    """Plain nested dicts with the overrides in force and every reference followed."""
    for path, value in values:
        _set_in_config(config, path, value)
    tree = _plain(config, "", errors, {dotted(path) for path, _ in values})
    defaults = schema.to_tree(Settings())
    for path, value in values:
        _set_in_tree(tree, defaults, path, value, errors)
    mesh = tree.get("mesh")
    if isinstance(mesh, dict) and isinstance(
        mesh.get("rules"), Mapping
    ):  # the form of mesh_configs/
        mesh |= {f"rules_{side}": rules for side, rules in mesh.pop("rules").items()}
    return tree


def dotted(path: Path) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def _split(key: str) -> Path:
    path: list[str | int] = []
    for part in key.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise _NoSuchKey(f"--config.{key}: {part!r} is not a key; write a.b or a[0].b")
        path += [match[1], *map(int, re.findall(r"\d+", match[2]))]
    return tuple(path)


def _annotation(path: Path) -> Any:
    """The type of the value a path leads to. Raises _NoSuchKey, also where it leads to a whole section."""
    annotation: Any = Settings
    for i, part in enumerate(path):
        annotation = _step(annotation, path[:i], part)
    names: list[str] = []
    if is_dataclass(annotation):
        names = list(schema.field_types(typing.cast(type, annotation)))
    elif (element := schema.element_type(annotation)) is not None:
        names = [f"[0].{name}" for name in schema.field_types(element)]
    elif schema.is_mapping(annotation):
        names = ["its own keys"]
    if names:
        raise _NoSuchKey(
            f"--config.{dotted(path)} is a section; set one of its keys: {', '.join(names)}"
        )
    return annotation


def _step(annotation: Any, where: Path, part: str | int) -> Any:
    """The type one key or index further."""
    at = dotted(where)
    if annotation is Any:
        return Any
    if is_dataclass(annotation) and isinstance(part, str):
        hints = schema.field_types(typing.cast(type, annotation))
        if part not in hints:
            raise _NoSuchKey(schema.unknown_key(at, part, list(hints)))
        return hints[part]
    if (element := schema.element_type(annotation)) is not None:
        if isinstance(part, int):
            return element
        raise _NoSuchKey(f"--config.{at}.{part}: {at} is a list; write --config.{at}[0].{part}=...")
    if schema.is_mapping(annotation) and isinstance(part, str):
        return typing.get_args(annotation)[1]
    if isinstance(part, int):
        raise _NoSuchKey(f"--config.{at}[{part}]: {at} is set whole: --config.{at}=a,b")
    raise _NoSuchKey(f"--config.{at}.{part}: {at} is a value, not a section")


def _set_in_config(node: Any, path: Path, value: Any) -> None:
    """Set a value inside a ConfigDict; nothing happens where the config file left the key out."""
    for part in path[:-1]:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError, RequiredValueError):
            return
    if isinstance(node, ConfigDict) and isinstance(path[-1], str) and path[-1] in node:
        with node.ignore_type():
            node[path[-1]] = value


def _set_in_tree(tree: Any, defaults: Any, path: Path, value: Any, errors: list[str]) -> None:
    """Set a value in plain dicts and lists; a section the config file left out starts from the defaults."""
    for i, part in enumerate(path):
        defaults = _child(defaults, part)
        if isinstance(part, str) and isinstance(tree, dict):
            tree.setdefault(part, {} if defaults is None else _mutable(defaults))
        elif _child(tree, part) is None:
            size = len(tree) if isinstance(tree, list) else 0
            errors.append(
                f"--config.{dotted(path)}: {dotted(path[:i])} has {size} elements, counted from 0"
            )
            return
        if i == len(path) - 1:
            tree[part] = value
        tree = tree[part]


def _child(node: Any, part: str | int) -> Any:
    try:
        return node[part]
    except (KeyError, IndexError, TypeError):
        return None


def _mutable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _mutable(v) for k, v in value.items()}
    return [_mutable(v) for v in value] if isinstance(value, (list, tuple)) else value


def _plain(node: Any, where: str, errors: list[str], given: set[str]) -> Any:
    """A ConfigDict as plain dicts, lists and values. A value that is still required is an error."""
    if isinstance(node, (ConfigDict, Mapping)):
        out = {}
        for key in node:
            path = f"{where}.{key}" if where else str(key)
            try:
                value = node[key]
            except RequiredValueError:
                value = REQUIRED
            if not (isinstance(value, str) and value == REQUIRED):
                out[key] = _plain(value, path, errors, given)
            elif path not in given:
                errors.append(f"{path} is required; give it with --config.{path}=...")
        return out
    if isinstance(node, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", errors, given) for i, v in enumerate(node)]
    return node
