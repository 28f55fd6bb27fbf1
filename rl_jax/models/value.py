"""A value model: the trunk of any family with a scalar in place of the vocabulary head.

Owns: ValueModel, which has what the learner needs of a Model (abstract, logical_axes, init, cast, hidden) and `values`
instead of `head`. Invariants: it shares no array with a policy; its trunk has the policy's names and shapes, so that
`from_policy` starts a critic or a reward model from any policy of these settings, tied or not (the output projection is
not part of it). The head starts at 0, so a fresh one says 0 everywhere, and is float32 in every dtype of the trunk: a
value is a regression target, not a choice among logits.

Use, as a critic: the value of the state before the token at t is read where its logits would be, from hidden[:, t - 1].
As a reward model: one number a sequence, `values(params, hidden)` at the sequence's last token.
Must not: know what its numbers mean, how they are trained (learner/critic.py) or where they lie.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rl_jax.models.attention import Attend
from rl_jax.models.model import Constrain, Model, Params, unconstrained
from rl_jax.settings import ModelSettings

HEAD = WEIGHT, BIAS = "value_head.weight", "value_head.bias"


@dataclass(frozen=True, eq=False)  # by identity, as Model
class ValueModel:
    trunk: Model
    abstract: Mapping[str, jax.ShapeDtypeStruct]  # of the trunk, and of the head (float32)
    logical_axes: Mapping[str, tuple[str | None, ...]]

    @property
    def settings(self) -> ModelSettings:
        return self.trunk.settings

    def init(self, key: jax.Array) -> Params:
        """Fresh Params: the trunk's as the key says, the head 0."""
        return self.trunk.init(key) | self._fresh_head()

    def from_policy(self, params: Mapping[str, jax.Array]) -> Params:
        """A copy of a policy's trunk under a head of 0; jit it with out_shardings to place it.

        Raises: ValueError for params of another model.
        """
        missing = [name for name in self.trunk.abstract if name not in params]
        if missing:
            raise ValueError(
                f"the policy lacks {len(missing)} weights of the value model's trunk, first {missing[0]!r}; "
                "build it from the policy's model settings"
            )
        return {name: jnp.copy(params[name]) for name in self.trunk.abstract} | self._fresh_head()

    def cast(self, params: Mapping[str, jax.Array], dtype: Any) -> Params:
        """The trunk in another dtype; the head stays float32."""
        return {n: a if n in (WEIGHT, BIAS) else a.astype(dtype) for n, a in params.items()}

    def hidden(
        self,
        params: Mapping[str, jax.Array],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        remat: str = "none",
        constrain: Constrain = unconstrained,
    ) -> Float[Array, "B T D"]:
        """As Model.hidden."""
        return self.trunk.hidden(params, tokens, positions, attend, remat, constrain)

    def values(
        self, params: Mapping[str, jax.Array], hidden: Float[Array, "... D"]
    ) -> Float[Array, "..."]:
        """float32 values of hidden states, at whichever positions the caller took."""
        weight = params[WEIGHT].astype(jnp.float32)
        return (hidden.astype(jnp.float32) * weight).sum(-1) + params[BIAS].astype(jnp.float32)

    def _fresh_head(self) -> Params:
        return {n: jnp.zeros(self.abstract[n].shape, jnp.float32) for n in (WEIGHT, BIAS)}


def value_model(
    build: Callable[[ModelSettings, int], Model], settings: ModelSettings, vocab_size: int
) -> ValueModel:
    """The value model of a family's builder (an entry of MODELS) and a policy's settings; no arrays yet."""
    trunk = build(replace(settings, tie_embeddings=True), vocab_size)  # no output projection
    head = {
        WEIGHT: jax.ShapeDtypeStruct((settings.embed_size,), jnp.float32),
        BIAS: jax.ShapeDtypeStruct((), jnp.float32),
    }
    return ValueModel(
        trunk=trunk,
        abstract={**trunk.abstract, **head},
        logical_axes={**trunk.logical_axes, WEIGHT: ("embed",), BIAS: ()},
    )
