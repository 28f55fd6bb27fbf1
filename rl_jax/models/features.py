"""What the layers of a decoder do by its settings, and which settings contradict each other. stdlib only.

Families differ in features alone: a window on some layers, a second rope base for those, soft caps, a scale of scores.
Everything that computes attention asks here, so that training rows, chunks and decode steps are the same function.
Must not: import jax, as a config is checked before it is loaded.
"""

from collections.abc import Iterator

from rl_jax.settings import ModelSettings, RopeSettings

# Scaling -> the fields of RopeSettings that it reads.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_context", "beta_fast", "beta_slow", "attention_factor"),
}
ACTIVATIONS = ("silu", "gelu_tanh")


def window_of(settings: ModelSettings, layer: int) -> int:
    """Tokens that a layer (from 0) sees back, its own included; 0 = all."""
    every = settings.full_every
    return 0 if every and (layer + 1) % every == 0 else settings.window


def score_scale(settings: ModelSettings) -> float:
    return settings.attention_scale or settings.head_dim**-0.5


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
