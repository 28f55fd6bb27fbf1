"""What the layers of a decoder do by its settings, and which settings contradict each other. stdlib only.

Families differ in features alone: a window on some layers, a second rope base for those, soft caps, a scale of scores.
Everything that computes attention asks here, so that training rows, chunks and decode steps are the same function.
Must not: import jax, as a config is checked before it is loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rl_jax.settings import ModelSettings, RopeSettings

# Scaling -> the fields of RopeSettings that it reads.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_context", "beta_fast", "beta_slow", "attention_factor"),
}
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class Form:
    """What one layer's attention computes beyond causal attention to all of its segment, scaled by 1 / sqrt(Dh)."""

    window: int = 0  # tokens it sees back, its own included; 0 = all
    scale: float | None = None  # of scores; None = head_dim ** -0.5
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0 = none


def form_of(settings: ModelSettings, layer: int) -> Form:
    """Of a layer, counted from 0."""
    s = settings
    is_full = s.full_every and (layer + 1) % s.full_every == 0
    scale = None if s.attention_scale in (0.0, s.head_dim**-0.5) else s.attention_scale
    return Form(0 if is_full else s.window, scale, s.attention_softcap)


def attention_unfit(settings: ModelSettings, longest: int = 0) -> str:
    """Why kernels of plain causal attention are none for this model; "" if they are.

    longest: tokens of a context, if known; a window that holds them all is none.
    """
    form = form_of(settings, 0)
    found = []
    if form.window and not 0 < longest <= form.window:
        found.append(f"window={form.window}")
    if form.scale is not None:
        found.append(f"attention_scale={form.scale:g}")
    if form.softcap:
        found.append(f"attention_softcap={form.softcap:g}")
    return f"attention kernels know no model.{', '.join(found)}" if found else ""


def layers_unfit(settings: ModelSettings) -> str:
    """Why kernels of the rest of a decode step's layer are none for this model; "" if they are."""
    s = settings
    found = [f"activation={s.activation}"] if s.activation != "silu" else []
    found += [name for name in ("norm_offset", "post_norms") if getattr(s, name)]
    return f"kernels of layers know no model.{', '.join(found)}" if found else ""


def feature_errors(settings: ModelSettings) -> Iterator[str]:
    """One line for each feature that has no effect or lacks what it needs."""
    s = settings
    if s.activation not in ACTIVATIONS:
        yield f"model.activation={s.activation} is not one of {', '.join(ACTIVATIONS)}"
    if s.full_every == 1 and s.window:
        yield (
            f"model.full_every=1 leaves no layer with model.window={s.window}; set window=0, or full_every to at"
            " least 2"
        )
    for name in ("full_every", "rope_theta_local"):
        if getattr(s, name) and not s.window:
            yield (
                f"model.{name}={getattr(s, name)} is of models with windowed layers, but model.window=0; set a"
                f" window, or {name}=0"
            )
    yield from _rope_errors(s.rope)


def context_errors(settings: ModelSettings, context: int) -> Iterator[str]:
    """A line if a server would hold more positions than the model was trained for."""
    most = settings.max_context
    if 0 < most < context:
        yield (
            f"engine.context={context} is above model.max_context={most}, the positions the model was trained for;"
            f" use at most {most}, or scale its rope and raise max_context"
        )


def _rope_errors(rope: RopeSettings) -> Iterator[str]:
    if rope.scaling not in ROPE_FIELDS:
        yield f"model.rope.scaling={rope.scaling} is not one of {', '.join(ROPE_FIELDS)}"
        return
    used, default = ROPE_FIELDS[rope.scaling], RopeSettings()
    for name, value in vars(rope).items():
        if name != "scaling" and name not in used and value != getattr(default, name):
            yield (
                f"model.rope.{name}={value} is not read by model.rope.scaling={rope.scaling}; leave it at"
                f" {getattr(default, name)}, or change the scaling"
            )
    if "original_context" in used and rope.original_context < 1:
        yield (
            f"model.rope.original_context={rope.original_context} must be the positions of pretraining for"
            f" model.rope.scaling={rope.scaling}"
        )
    if rope.low_freq_factor >= rope.high_freq_factor:
        yield (
            f"model.rope.low_freq_factor={rope.low_freq_factor} must be below"
            f" high_freq_factor={rope.high_freq_factor}"
        )
    if rope.beta_slow >= rope.beta_fast:
        yield f"model.rope.beta_slow={rope.beta_slow} must be below beta_fast={rope.beta_fast}"
