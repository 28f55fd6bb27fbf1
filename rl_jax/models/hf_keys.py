"""What the keys of a config.json say: numbers, windows and rope, each with its error.

Rope is read in both spellings, `rope_theta` + `rope_scaling` and `rope_parameters` (flat, or by layer type).
Must not: know which families there are (hf_config.py), or import jax.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_jax.settings import RopeSettings

CONFIG = "config.json"
FULL, SLIDING = "full_attention", "sliding_attention"
MOST = 2**31 - 1  # of a size: what an index of 32 bits reaches
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Keys:
    """A text model's keys over its family's defaults."""

    name: str  # model type
    values: Mapping[str, Any]

    def error(self, text: str) -> ValueError:
        return ValueError(f"{CONFIG} of a {self.name}: {text}")

    def count(self, key: str, most: int = MOST, least: int = 1) -> int:
        """A whole number. Raises: ValueError."""
        return self.whole(key, self.values.get(key), most, least)

    def whole(self, key: str, value: Any, most: int = MOST, least: int = 1) -> int:
        """The value, which stands under `key`, if it is a whole number from `least` to `most`. Raises: ValueError."""
        self._there(key, value)
        if not _is_number(value) or value != int(value) or not least <= value <= most:
            above = "above 0" if least == 1 else f"from {least}"
            raise self.error(
                f"{key}={short(value)} must be a whole number {above}, at most {most}; fetch the file again"
            )
        return int(value)

    def number(self, key: str) -> float:
        """A number above 0. Raises: ValueError."""
        return self.positive(key, self.values.get(key))

    def cap(self, key: str) -> float:
        """A number above 0, or 0 where there is none. Raises: ValueError."""
        return 0.0 if self.values.get(key) is None else self.number(key)

    def positive(self, key: str, value: Any) -> float:
        """The value, which stands under `key`, if it is a finite number above 0. Raises: ValueError."""
        self._there(key, value)
        if not _is_number(value) or not value > 0:
            raise self.error(
                f"{key}={short(value)} must be a finite number above 0; fetch the file again"
            )
        return float(value)

    def flag(self, key: str) -> bool:
        """true, or false, which null and an absent key are too. Raises: ValueError."""
        value = self.values.get(key)
        if not isinstance(value, bool | None):
            raise self.error(f"{key}={short(value)} must be true or false; fetch the file again")
        return bool(value)

    def text(self, key: str) -> str | None:
        """A text; None where there is none. Raises: ValueError."""
        value = self.values.get(key)
        if not isinstance(value, str | None):
            raise self.error(f"{key}={short(value)} must be a text; fetch the file again")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of texts; None where there is none. Raises: ValueError."""
        value = self.values.get(key)
        is_list = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if value is not None and not is_list:
            raise self.error(f"{key}={short(value)} must be a list of texts; fetch the file again")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; an empty one where there is none. Raises: ValueError."""
        return self.object(key, self.values.get(key))

    def object(self, key: str, value: Any) -> Mapping[str, Any]:
        """The value, which stands under `key`, if it is an object or null. Raises: ValueError."""
        if not isinstance(value, Mapping | None):
            raise self.error(f"{key}={short(value)} must be an object; fetch the file again")
        return value or {}

    def _there(self, key: str, value: Any) -> None:
        if value is None:
            raise self.error(f"{key} is missing; fetch the file again")


def _is_number(value: Any) -> bool:
    """Whether it is one that a float holds, and finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# --- windows --------------------------------------------------------------------------------------


def read_windows(keys: Keys, kind: str, num_layers: int) -> tuple[int, int]:
    """(window, full_every) of ModelSettings."""
    types = _types(keys, kind, num_layers)
    if SLIDING not in types:
        return 0, 0
    window = keys.count("sliding_window")
    if FULL not in types:
        return window, 0
    every = types.index(FULL) + 1
    if [FULL if not n % every else SLIDING for n in range(1, num_layers + 1)] != list(types):
        raise keys.error(
            f"layers with and without a window in the order {''.join(t[0] for t in types)} (s = sliding, f = full):"
            " only a full layer every n-th layer is known"
        )
    return window, every


def _types(keys: Keys, kind: str, num_layers: int) -> Sequence[str]:
    values = keys.values
    has_window = values.get("sliding_window") is not None
    if kind == "none":
        return [FULL] * num_layers
    if kind == "all":
        if len(set(keys.texts("layer_types") or ())) > 1:
            raise keys.error("layer_types differ, which this family does not apply; remove them")
        return [SLIDING if has_window else FULL] * num_layers
    if kind == "from":
        has_window = has_window and keys.flag("use_sliding_window")
    types = keys.texts("layer_types")
    if types is not None:
        if len(types) != num_layers or set(types) - {FULL, SLIDING}:
            raise keys.error(
                f"layer_types must be {num_layers} times {FULL} or {SLIDING}, not {short(types)}"
            )
        if SLIDING in types and not has_window:
            raise keys.error(
                f"layer_types has {SLIDING} but there is no sliding_window (or it is not in use)"
            )
        return types
    if not has_window:
        return [FULL] * num_layers
    if kind == "from":
        first = keys.count("max_window_layers", least=0) if "max_window_layers" in values else 28
        return [SLIDING if n >= first else FULL for n in range(num_layers)]
    every = keys.count("sliding_window_pattern")
    return [SLIDING if n % every else FULL for n in range(1, num_layers + 1)]


# --- rope -----------------------------------------------------------------------------------------


def read_ropes(keys: Keys, has_window: bool) -> tuple[float, RopeSettings, float]:
    """(rope_theta, rope, rope_theta_local) of ModelSettings."""
    where, given = _given(keys)
    by_type = {t: keys.object(f"{where}.{t}", given[t]) for t in (FULL, SLIDING) if given.get(t)}
    full = by_type.get(FULL, {}) if by_type else given
    theta, rope = _rope(keys, full, keys.values.get("rope_theta"))
    if not has_window:
        return theta, rope, 0.0
    if SLIDING in by_type:
        default = keys.values.get("rope_local_base_freq", keys.values.get("rope_theta"))
        local, local_rope = _rope(keys, by_type[SLIDING], default)
        if (local, local_rope) == (theta, rope):
            return theta, rope, 0.0
        if local_rope != RopeSettings():
            raise keys.error(
                f"rope_parameters: {SLIDING} is scaled ({local_rope.scaling}) in another way than {FULL};"
                " the same scaling or none is known"
            )
        return theta, rope, local
    if "rope_local_base_freq" in keys.values:
        return theta, rope, keys.number("rope_local_base_freq")
    return theta, rope, 0.0


def _given(keys: Keys) -> tuple[str, Mapping[str, Any]]:
    """(key, value) of what says how rope is stretched."""
    new, old = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    return ("rope_parameters", new) if new else ("rope_scaling", old)


def _rope(keys: Keys, given: Mapping[str, Any], theta: Any) -> tuple[float, RopeSettings]:
    """One rope: its base, and its scaling."""
    where, _ = _given(keys)
    base = keys.positive("rope_theta", given.get("rope_theta", theta))
    partial = given.get("partial_rotary_factor", keys.values.get("partial_rotary_factor"))
    if partial is not None and keys.positive("partial_rotary_factor", partial) != 1:
        raise keys.error(f"partial_rotary_factor={partial}: rope turns whole heads here")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("default", None):
        return base, RopeSettings()
    if kind not in ("linear", "llama3", "yarn"):
        raise keys.error(
            f"{where} of type {repr(kind)[:60]} is not known; default, linear, llama3 and yarn are"
        )

    def value(key: str, default: float | None = None) -> float:
        found = given.get(key)
        return keys.positive(f"{where}.{key}", default if found is None else found)

    if kind == "linear":
        return base, RopeSettings(scaling=kind, factor=value("factor"))
    top = keys.values.get("original_max_position_embeddings")
    trained = top if top is not None else given.get("original_max_position_embeddings")
    if trained is None:
        trained = keys.values.get("max_position_embeddings")
    original = keys.whole(f"{where}.original_max_position_embeddings", trained)
    if kind == "llama3":
        return base, RopeSettings(
            scaling=kind,
            factor=value("factor"),
            original_context=original,
            low_freq_factor=value("low_freq_factor"),
            high_freq_factor=value("high_freq_factor"),
        )
    for key, plain in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        if given.get(key, plain) not in (plain, None):
            raise keys.error(f"{where}.{key}={short(given[key])} of yarn is not known here")
    stretch = keys.count("max_position_embeddings") / original
    factor = value("factor", stretch)
    if factor * original > MOST:
        raise keys.error(
            f"{where}.factor={factor} times {original} positions is above {MOST}; fetch the file again"
        )
    return base, RopeSettings(
        scaling=kind,
        factor=factor,
        original_context=original,
        beta_fast=value("beta_fast", 32.0),
        beta_slow=value("beta_slow", 1.0),
        attention_factor=0.0
        if given.get("attention_factor") is None
        else value("attention_factor"),
    )


def written_rope(rope: RopeSettings) -> dict[str, Any] | None:
    """rope_scaling of a config.json."""
    if rope.scaling == "none":
        return None
    out: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling != "linear":
        out["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor:
            out["attention_factor"] = rope.attention_factor
    return out
