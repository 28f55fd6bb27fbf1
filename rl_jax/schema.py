"""The settings' dataclasses read as a schema: which keys exist, of what type, and how a text becomes a value.

Owns: `build` (a tree of mappings -> a dataclass, every error at once), `parse_value` (the text of an override),
`unknown_key` (the error line with the nearest names). Invariants: nothing is guessed or dropped: an unknown key, a
float where an int belongs, a value that is not finite are each one error line that starts with the dotted key; a field
in error keeps its default, so that the other checks can go on.
Must not: know a rule about a value (validate.py), ml_collections (config.py) or jax.
"""

import ast
import difflib
import math
import numbers
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any

from rl_jax.settings import Settings

NUM_SUGGESTIONS = 3
MIN_RATIO = 0.6  # of difflib: below, a name only looks alike


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Field name -> resolved annotation, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def element_type(annotation: Any) -> type | None:
    """The dataclass X of tuple[X, ...], else None."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and args and is_dataclass(args[0]):
        return typing.cast(type, args[0])
    return None


def describe(annotation: Any) -> str:
    """The type as a person would say it."""
    if annotation in (int, float, bool, str):
        return {int: "an int", float: "a float", bool: "true or false", str: "a string"}[annotation]
    if annotation is types.NoneType:
        return "none"
    if is_union(annotation):
        return " or ".join(describe(a) for a in typing.get_args(annotation))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a sequence of ({describe(args[0])})"
    if origin is tuple:
        return "(" + ", ".join(describe(a) for a in args) + ")"
    return "a mapping" if is_mapping(annotation) or is_dataclass(annotation) else "any value"


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def is_mapping(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Mapping


def leaf_keys(cls: type = Settings, prefix: str = "") -> Iterator[str]:
    """Every dotted leaf key; one element stands for each sequence of sections: `mesh.pools[0].name`."""
    for name, annotation in field_types(cls).items():
        if is_dataclass(annotation):
            yield from leaf_keys(typing.cast(type, annotation), f"{prefix}{name}.")
        elif (element := element_type(annotation)) is not None:
            yield from leaf_keys(element, f"{prefix}{name}[0].")
        else:
            yield prefix + name


def sections(cls: type = Settings, where: str = "") -> Iterator[tuple[str, set[str]]]:
    """(dotted key, its fields) of the whole and of every section in it; sequences of sections are not entered."""
    hints = field_types(cls)
    yield where, set(hints)
    for name, annotation in hints.items():
        if is_dataclass(annotation):
            yield from sections(typing.cast(type, annotation), f"{where}.{name}".lstrip("."))


def nearest(name: str, names: Iterable[str], num: int = NUM_SUGGESTIONS) -> list[str]:
    """The names most like `name`, in upper or lower case; the one that differs in case alone stands by itself."""
    by_lower: dict[str, list[str]] = {}
    for known in names:
        by_lower.setdefault(known.lower(), []).append(known)
    if (same := by_lower.get(name.lower())) is not None:
        return same
    near = difflib.get_close_matches(name.lower(), by_lower, num, cutoff=0.5)
    return [known for lower in near for known in by_lower[lower]]


def unknown_key(where: str, name: str, siblings: Sequence[str]) -> str:
    """The error line with the nearest keys: a near sibling, then the same name in another section, then a near one."""
    section = f"{where}." if where else ""
    scores: dict[str, float] = {}
    for key in [*(section + n for n in siblings), *leaf_keys()]:
        leaf = key.rsplit(".", 1)[-1]
        initials = "".join(word[:1] for word in leaf.split("_"))  # lr is learning_rate
        is_short = len(initials) > 1 and initials == name.lower()
        near = 1.0 if is_short else difflib.SequenceMatcher(None, name.lower(), leaf).ratio()
        scores.setdefault(key, near if leaf in siblings and key == section + leaf else 0.9 * near)
    best = sorted(scores, key=lambda key: (-scores[key], len(key)))
    near_ones = [key for key in best if scores[key] >= MIN_RATIO][:NUM_SUGGESTIONS]
    return f"{section}{name} is not a key; did you mean {', '.join(near_ones or best[:NUM_SUGGESTIONS])}?"


def to_tree(settings: Any) -> dict[str, Any]:
    """A settings dataclass as nested dicts, tuples and scalars; `build` of it gives the same dataclass."""
    return asdict(settings)


def leaves(tree: Any, where: str = "") -> dict[str, Any]:
    """Dotted key -> value; sequences of sections are entered (`mesh.pools[0].name`), other values are leaves."""
    out: dict[str, Any] = {}
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            out.update(leaves(value, f"{where}.{key}" if where else str(key)))
    elif isinstance(tree, (list, tuple)) and tree and all(isinstance(v, Mapping) for v in tree):
        for i, value in enumerate(tree):
            out.update(leaves(value, f"{where}[{i}]"))
    else:
        out[where] = list(tree) if isinstance(tree, tuple) else tree
    return out


def build(cls: type, tree: Any, where: str, errors: list[str]) -> Any:
    """The dataclass a tree of mappings describes; absent keys take their default. Errors are appended, never raised."""
    if is_dataclass(tree) and isinstance(tree, cls):
        return tree
    if not isinstance(tree, Mapping):
        errors.append(
            f"{where or 'config'}={tree!r} must be a section with keys {', '.join(field_types(cls))}"
        )
        return cls()
    hints, values = field_types(cls), {}
    for name in tree:
        if name not in hints:
            errors.append(unknown_key(where, str(name), list(hints)))
    for f in fields(cls):
        if f.name in tree:
            path = f"{where}.{f.name}" if where else f.name
            before = len(errors)
            value = coerce(tree[f.name], hints[f.name], path, errors)
            holds_sections = is_dataclass(hints[f.name]) or element_type(hints[f.name])
            if len(errors) == before or (holds_sections and value is not None):
                values[f.name] = value
    return cls(**values)


def coerce(value: Any, annotation: Any, where: str, errors: list[str]) -> Any:
    """`value` as the annotated type; only what loses nothing is converted (int to float, list to tuple)."""
    if annotation is Any:
        return plain(value, where, errors)
    if is_dataclass(annotation):
        return build(typing.cast(type, annotation), value, where, errors)
    if annotation is types.NoneType and value is None:
        return None
    if is_union(annotation):
        return _coerce_union(value, annotation, where, errors)
    if annotation in (int, float, bool, str):
        return _coerce_scalar(value, annotation, where, errors)
    args = typing.get_args(annotation)
    if is_mapping(annotation) and isinstance(value, Mapping):
        return {str(k): coerce(value[k], args[1], f"{where}.{k}", errors) for k in value}
    if typing.get_origin(annotation) is tuple and isinstance(value, (list, tuple)):
        if args[-1] is Ellipsis:
            return tuple(coerce(v, args[0], f"{where}[{i}]", errors) for i, v in enumerate(value))
        if len(args) == len(value):
            return tuple(
                coerce(v, a, f"{where}[{i}]", errors) for i, (v, a) in enumerate(zip(value, args))
            )
    errors.append(f"{where}={value!r} must be {describe(annotation)}")
    return None


def _coerce_union(value: Any, annotation: Any, where: str, errors: list[str]) -> Any:
    inner: list[str] = []  # of an option that the value is, but for something in it
    for option in typing.get_args(annotation):
        found: list[str] = []
        converted = coerce(value, option, where, found)
        if not found:
            return converted
        inner += [error for error in found if error.startswith((f"{where}.", f"{where}["))]
    errors.extend(inner or [f"{where}={value!r} must be {describe(annotation)}"])
    return None


def _coerce_scalar(value: Any, kind: type, where: str, errors: list[str]) -> Any:
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        if not math.isfinite(value):
            errors.append(f"{where}={value!r} must be a finite number")
            return 0.0
        return float(value)
    if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        errors.append(f"{where}={value!r} must be an int; write {int(value)}")
    elif type(value) is kind:
        return value
    else:
        errors.append(f"{where}={value!r} must be {describe(kind)}")
    return kind()


def plain(value: Any, where: str, errors: list[str]) -> Any:
    """A free value as JSON-like data: what is stored in config.json is what the environment gets."""
    if isinstance(value, Mapping):
        return {str(k): plain(value[k], f"{where}.{k}", errors) for k in value}
    if isinstance(value, (list, tuple)):
        return tuple(plain(v, f"{where}[{i}]", errors) for i, v in enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        errors.append(f"{where}={value!r} must be a finite number")
        return 0.0
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    errors.append(
        f"{where}={value!r} is a {type(value).__name__}; a config holds numbers, strings, lists, mappings"
    )
    return None


def parse_value(text: str, annotation: Any, where: str, errors: list[str]) -> Any:
    """The text after `=` of an override as the annotated type: `true`, `1e-3`, `(64, 512)`, `64,512`, `a,b`."""
    if annotation is str:
        return text
    lowered = text.strip().lower()
    if lowered in ("nan", "inf", "+inf", "-inf", "infinity", "-infinity"):
        return coerce(float(lowered), float, where, errors)
    value: Any = text
    if lowered in ("true", "false", "none"):
        value = {"true": True, "false": False, "none": None}[lowered]
    else:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = text
    if typing.get_origin(annotation) is tuple and not isinstance(value, (list, tuple)):
        items = text.split(",") if isinstance(value, str) else [value]
        value = tuple(
            item.strip() if isinstance(item, str) else item for item in items if item != ""
        )
    return coerce(value, annotation, where, errors)
