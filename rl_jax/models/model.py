"""A model as the rest of the system sees it: pure functions of a flat dict of arrays.

Owns: the mapping between an nnx module and `Params`, a plain dict from names such as
"layers.0.attention.query" to arrays (per-layer weights, nothing stacked). That one tree is what is
trained, synchronised and checkpointed. Servers run `packed`, the same model over fewer and larger weights: products
that read one input are one product there. `pack` makes its Params from these.
Invariants: the module is built once from abstract shapes (`nnx.eval_shape`) and split once; no call
costs more than `nnx.merge` while tracing. A parameter's initial value depends on the key and its
name only, never on order or sharding. A family's module has
`hidden(tokens, positions, attend, remat, constrain)` and `head()`.
Life: 1 a family's builder makes the Model from settings. 2 `init(key)` (or a checkpoint) gives
Params, inside a jit whose out_shardings come from `logical_axes`. 3 the learner differentiates
`hidden` with its attend; engines run `hidden` of cast Params with theirs. 4 `logits` turns hidden
states into float32 logits.
Must not: know meshes, KV storage or sampling; use nnx.jit (it traverses the module on every call).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels.linear_logprob import soft_capped
from rl_jax.models import layers
from rl_jax.models.attention import Attend
from rl_jax.models.normals import normals
from rl_jax.settings import ModelSettings

Params = dict[str, jax.Array]

# (array, its logical axes) -> the array, held to a layout on the caller's mesh.
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def unconstrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """The Constrain of one device: the array as it is."""
    return x


@dataclass(frozen=True)
class Join:
    """How one packed weight is made."""

    parts: tuple[str, ...]  # names of the weights it joins
    of: Callable[[list[jax.Array]], jax.Array]
    # Its dimensions as they lie in memory where kernels for many rows read it, what is summed over innermost.
    rows_order: tuple[int, ...] | None = None  # None: as they are


@dataclass(frozen=True, eq=False)  # by identity, so that a Model may be a static argument of jit
class Model:
    settings: ModelSettings
    vocab_size: int
    abstract: Mapping[str, jax.ShapeDtypeStruct]  # name -> shape and param_dtype
    logical_axes: Mapping[str, tuple[str | None, ...]]  # name -> what each dimension means
    graphdef: Any  # of the nnx module, without arrays
    treedef: Any  # of the module's state; its leaves are in the order of `abstract`
    initial: Mapping[str, tuple[float, float]]  # name -> (mean, std) of the initial values
    packed: "Model | None" = None  # None: this is the packed form
    joins: Mapping[str, "Join"] = field(default_factory=dict)  # its names that are not among ours

    def init(self, key: jax.Array) -> Params:
        """Fresh Params in param_dtype; jit it with out_shardings to make them where they live."""
        shapes = {n: self.abstract[n].shape for n, (_, std) in self.initial.items() if std > 0}
        drawn = normals(key, shapes)
        params = {}
        for name, spec in self.abstract.items():
            mean, std = self.initial[name]
            values = mean + std * drawn[name] if name in drawn else jnp.full(spec.shape, mean)
            params[name] = values.astype(spec.dtype)
        return params

    def cast(self, params: Mapping[str, jax.Array], dtype: Any) -> Params:
        """Params in another dtype: a served copy is cast once, when it is made."""
        return {name: array.astype(dtype) for name, array in params.items()}

    def pack(
        self,
        params: dict[str, jax.Array],
        join: Callable[[str, list[jax.Array]], jax.Array] | None = None,
    ) -> Params:
        """Params of `packed`: joined arrays, and the others as they are.

        The dict is emptied on the way, so that no more than one weight's parts are held twice. join: makes the packed
        weight of a name from its parts; None = as `joins` says, where the parts lie.
        """
        assert self.packed is not None, "these are packed already"
        join = join or (lambda name, parts: self.joins[name].of(parts))
        packed = {}
        for name in self.packed.abstract:
            if name in params:
                packed[name] = params.pop(name)
            else:
                packed[name] = join(name, [params.pop(part) for part in self.joins[name].parts])
        return packed

    def hidden(
        self,
        params: Mapping[str, jax.Array],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        remat: str = "none",
        constrain: Constrain = unconstrained,
    ) -> Float[Array, "B T D"]:
        """Final-normed hidden states in settings.dtype; logits for token t + 1 come from [:, t].

        attend is called once per layer, in order, and may keep the k and v it is given. remat is what
        the backward pass computes again, and attend must then be pure: "none", "elementwise" (all but
        products with weights and a kernel's attention) or "layer" (all but the latter). constrain
        sees the embedding table as ("vocab", None) and activations as ("batch", "length", None):
        without it XLA may split activations over the axes that fsdp splits weights over.
        """
        return self._module(params).hidden(tokens, positions, attend, remat, constrain)

    def head(self, params: Mapping[str, jax.Array]) -> Float[Array, "D V"]:
        """The output projection in settings.dtype; the transposed embedding where they are tied."""
        return self._module(params).head()

    def logits(
        self, params: Mapping[str, jax.Array], hidden: Float[Array, "... D"]
    ) -> Float[Array, "... V"]:
        """float32 logits, soft-capped, accumulated in float32. Holds [..., V]: take few positions at a time."""
        logits = jnp.einsum(
            "...d,dv->...v", hidden, self.head(params), preferred_element_type=jnp.float32
        )
        return soft_capped(logits, self.settings.logit_softcap)

    def _module(self, params: Mapping[str, jax.Array]) -> Any:
        missing = [name for name in self.abstract if name not in params]
        if missing:
            raise ValueError(
                f"params lack {len(missing)} of this model's {len(self.abstract)} weights, first "
                f"{missing[0]!r}; load a checkpoint of the same model settings"
            )
        leaves = [params[name] for name in self.abstract]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def model_from_module(
    make: Callable[[], nnx.Module], settings: ModelSettings, vocab_size: int
) -> Model:
    """The Model of an nnx module; `make` is only traced, so no weight is allocated."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    flat = [
        (".".join(str(part) for part in path), variable)
        for path, variable in nnx.to_flat_state(state)
    ]
    leaves, treedef = jax.tree.flatten(state)
    shapes = {name: leaf for (name, _), leaf in zip(flat, leaves, strict=True)}
    for name, variable in flat:
        axes = variable.get_metadata()[layers.LOGICAL_AXES]
        assert shapes[name].ndim == len(axes), f"{name}: {shapes[name].shape} against {axes}"
    metadata = {name: variable.get_metadata() for name, variable in flat}
    return Model(
        settings=settings,
        vocab_size=vocab_size,
        abstract={n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in shapes.items()},
        logical_axes={n: m[layers.LOGICAL_AXES] for n, m in metadata.items()},
        graphdef=graphdef,
        treedef=treedef,
        initial={n: (m[layers.INIT_MEAN], m[layers.INIT_STD]) for n, m in metadata.items()},
    )
