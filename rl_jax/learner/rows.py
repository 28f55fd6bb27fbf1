"""How batches lie on one mesh, and a model's forward over their rows: shared by policy, critic and frozen roles.

Owns: the fixed capacity (max_rows rows of settings.row_tokens, cut into microbatches), the split of rows over the
mesh's batch axes, the layout of weights by the rules, the choice of attention. Holds no array. One Rows is one model on
one mesh; a host Batch goes to as many of them as there are roles.
Must not: know what is trained.
"""

import logging
from collections.abc import Mapping
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.linear_logprob import Hopper, Split
from rl_jax.learner.attention import choose_attention
from rl_jax.learner.batch import Batch
from rl_jax.learner.microbatches import Arrays, microbatches
from rl_jax.learner.packing import balance_of
from rl_jax.learner.step import Forward, ValueForward
from rl_jax.mesh import RulesLike, constrainer, mesh_axes, named_sharding, shardings
from rl_jax.models.model import Model
from rl_jax.models.value import ValueModel
from rl_jax.settings import LearnerSettings, ModelSettings

LOG = logging.getLogger(__name__)


class Rows:
    def __init__(
        self,
        model: Model | ValueModel,
        mesh: Mesh,
        rules: RulesLike,
        settings: LearnerSettings,
        *,
        max_rows: int,
    ):
        """No device work and no compile.

        Args:   max_rows: most rows a batch may have; at worst one trajectory a row.
        Raises: ValueError for rows that the mesh does not divide, or an attention it cannot run.
        """
        self.model, self.mesh, self.settings = model, mesh, settings
        (axes,) = mesh_axes(("batch",), rules)
        self.num_shards = prod(mesh.shape[axis] for axis in axes)
        if settings.microbatch_rows % self.num_shards:
            n = settings.microbatch_rows
            raise ValueError(
                f"learner.microbatch_rows={n} is not divisible by mesh axes {'*'.join(axes)}={self.num_shards}; "
                f"use {max(n - n % self.num_shards, self.num_shards)}"
            )
        self.sharding = named_sharding((None, "batch", None), rules, mesh)  # of arrays [M, R, *]
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.is_shared = not self.replicated.is_fully_addressable  # with other processes
        self.param_shardings: dict[str, NamedSharding] = shardings(model.logical_axes, rules, mesh)
        self.capacity = max(ceil(max_rows / settings.microbatch_rows), 1)
        self.chunk = min(
            max(settings.logprob_chunk // settings.microbatch_rows, 1), settings.row_tokens
        )
        self.attention, self._attention = choose_attention(
            settings.attention, model.settings, rules, mesh, settings.row_tokens
        )
        self.balance = balance_of(model, self.num_shards)  # for pack
        self._constrain, self._rules = constrainer(rules, mesh), rules

    def log_probs(self, temperature: float) -> Forward:
        """The forward of a policy, for one temperature of sampling."""
        return Forward(
            self.model,
            self._constrain,
            self._attention,
            self.settings.remat,
            self.chunk,
            temperature,
            split=_split(self._rules, self.mesh),
            hopper=_hopper(self.mesh, self.model.settings),
        )

    def values(self, lookback: int = 1) -> ValueForward:
        """The forward of a value model."""
        return ValueForward(
            self.model, self._constrain, self._attention, self.settings.remat, lookback
        )

    def put(self, batch: Batch, version: int) -> dict[str, jax.Array]:
        """The batch on the mesh, as version `version` consumes it. Raises: ValueError if it does not fit."""
        arrays, target = self._cut(batch, version)
        if self.is_shared:
            return {
                n: jax.make_array_from_callback(np.shape(a), target[n], np.asarray(a).__getitem__)
                for n, a in arrays.items()
            }
        return jax.device_put(arrays, target)

    def abstract(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of what `put` makes of any batch with these extras."""
        arrays, target = self._cut(batch, 0)
        return {
            n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=target[n]) for n, a in arrays.items()
        }

    def _cut(self, batch: Batch, version: int) -> tuple[Arrays, dict[str, NamedSharding]]:
        if batch.row_tokens != self.settings.row_tokens:
            raise ValueError(
                f"the batch was packed into rows of {batch.row_tokens} tokens, the learner takes "
                f"learner.row_tokens={self.settings.row_tokens}; pack with the same settings"
            )
        arrays: Arrays = microbatches(
            batch,
            version,
            capacity=self.capacity,
            microbatch_rows=self.settings.microbatch_rows,
            chunk=self.chunk,
        )
        target = {
            n: self.sharding if np.ndim(a) >= 3 else self.replicated for n, a in arrays.items()
        }
        return arrays, target

    def place(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Weights where the rules want them."""
        return jax.device_put(dict(params), self.param_shardings)

    def cast(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The same in the compute dtype: what a role that is not trained holds."""
        return self._cast()(self.place(params))

    def abstract_cast(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of what `cast` makes."""
        return self._cast().lower(dict(self.model.abstract)).out_info

    def _cast(self) -> Any:
        return jax.jit(
            lambda p: jax.tree.map(jnp.copy, self.model.cast(p, self.model.settings.dtype)),
            out_shardings=self.param_shardings,
        )


def _split(rules: RulesLike, mesh: Mesh) -> Split | None:
    """How rows and the vocabulary lie on the mesh, by the rules; None on one device."""
    if mesh.size == 1:
        return None
    batch, vocab = mesh_axes(("batch", "vocab"), rules)
    return Split(mesh, batch, vocab)


def _hopper(mesh: Mesh, settings: ModelSettings) -> Hopper | None:
    """The cards of the mesh, if they are Hopper GPUs whose kernels know the model's logits."""
    device: Any = mesh.devices.flat[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        return None
    if settings.logit_softcap:
        LOG.warning(
            "log-probs by the portable way: the Hopper kernels know no model.logit_softcap=%g",
            settings.logit_softcap,
        )
        return None
    return Hopper(device.core_count)
