"""cuDNN's fused attention as XLA custom calls: causal over ragged sequences, forward and backward.

XLA's GPU compiler turns these calls into cuDNN graphs. They are written here rather than taken from `jax.nn` because
that function asks for the cuDNN library and the device while tracing, so it neither lowers on a machine without a GPU
nor takes packed rows; the calls are the ones it makes (jax/_src/cudnn/fused_attention_stablehlo.py).
Contract of forward and backward, for q [B, T, H, Dh], k and v [B, T, K, Dh] of 16 bits and N = B * M sequences:
sequence n is `lengths[n]` columns of the flattened rows [B * T] from `starts[n]`, and does not cross a row. Unused
entries have length 0 and start B * T and come last. A query sees its own sequence up to itself; scores are scaled by
1 / sqrt(Dh). Columns outside of the sequences are neither meant nor promised to be written: the caller masks them.
stats [N, H, T] is the log-sum-exp of each query's scores, by position in its sequence.
Needs: Hopper or later, cuDNN 9.6 or later, Dh a multiple of 8 and at most 128. Not deterministic: gradients of q are
summed in any order, unless XLA is told to be.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
# What jax.export must be told to let pass: XLA promises no stability of these two over versions.
CUSTOM_CALLS = (FORWARD, BACKWARD)
_BY_HEAD = (0, 2, 1, 3)  # results are [B, H, T, Dh] that lie in memory as [B, T, H, Dh]

# (contracting dimensions, batch dimensions) of left and right, in the order of XLA's config.
_FORWARD_DOTS = {
    "bmm1": ((3, 3), ((0, 2), (0, 2))),
    "bmm2": ((3, 1), ((0, 1), (0, 2))),
}
_BACKWARD_DOTS = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dh], stats f32[N, H, T])"""
    B, T, H, Dh = q.shape
    results = [
        jax.ShapeDtypeStruct((B, H, T, Dh), q.dtype),
        jax.ShapeDtypeStruct((lengths.size, H, T), jnp.float32),
    ]
    operands = (q, k, v, *_ragged(q, k, lengths, starts))
    out, stats = _call(FORWARD, results, 1, _config(q, lengths, _FORWARD_DOTS), operands)
    return out.swapaxes(1, 2), stats


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    saved: tuple[jax.Array, jax.Array],
    of_out: jax.Array,
    sequences: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v. saved: what forward gave; sequences: (lengths, starts) it was given."""
    (out, stats), (lengths, starts) = saved, sequences
    results = [
        jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype)
        for x in (q, k, v)
    ]
    operands = (q, k, v, stats, of_out, out, *_ragged(q, k, lengths, starts))
    found = _call(BACKWARD, results, 3, _config(q, lengths, _BACKWARD_DOTS), operands)
    of_q, of_k, of_v = (x.swapaxes(1, 2) for x in found)
    return of_q, of_k, of_v


def _ragged(q: jax.Array, k: jax.Array, lengths: jax.Array, starts: jax.Array) -> tuple:
    """Lengths [B, M] of q's and k's sequences, and their offsets [B, M + 1] in elements."""
    B, T, H, Dh = q.shape
    offsets = jnp.concatenate([starts, jnp.full((B,), B * T, starts.dtype)]).reshape(B, -1)
    lengths = lengths.reshape(B, -1)
    return lengths, lengths, offsets * (H * Dh), offsets * (k.shape[2] * Dh)


def _call(target: str, results: list, num_by_head: int, config: str, operands: tuple) -> list:
    """The custom call's results, without its workspace, which XLA sizes."""
    layouts = [
        _BY_HEAD if i < num_by_head else tuple(range(len(x.shape))) for i, x in enumerate(results)
    ]
    call = jax.ffi.ffi_call(
        target,
        [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)],
        output_layouts=[*layouts, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=config,
    )
    return list(call(*operands))[:-1]


def _config(q: jax.Array, lengths: jax.Array, dots: dict[str, Any]) -> str:
    B, T, H, Dh = q.shape
    fmha = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": Dh**-0.5,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
            "dimensions": [str(n) for n in (B, H, T, T)],
            "tuple_shapes": [],
            "layout": {
                "dim_level_types": [],
                "dim_unique": [],
                "dim_ordered": [],
                "minor_to_major": ["3", "2", "1", "0"],
                "tiles": [],
                "element_size_in_bits": "0",
                "memory_space": "0",
                "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "dynamic_shape_metadata_prefix_bytes": "0",
            },
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        **{f"{name}_dot_dimension_numbers": _dot(*dims) for name, dims in dots.items()},
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": lengths.size // B,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": fmha})


def _dot(contracting: tuple[int, int], batch: tuple[tuple[int, int], tuple[int, int]]) -> dict:
    return {
        "lhs_contracting_dimensions": [str(contracting[0])],
        "rhs_contracting_dimensions": [str(contracting[1])],
        "lhs_batch_dimensions": [str(i) for i in batch[0]],
        "rhs_batch_dimensions": [str(i) for i in batch[1]],
    }
