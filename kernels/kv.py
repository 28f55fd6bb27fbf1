"""KVSpec: the one description of how a KV cache lies in memory.

The kernel that reads a cache picks its layout; engines, prefix transfer and memory plans take shapes
from the spec and hard-code nothing. Two caches may exchange prefixes when `same_tokens` holds.
Layout "slots": per layer two separate arrays k and v, each [num_pages, page_size, num_kv_heads,
head_dim]; a page is a whole slot, so page_size is the context and num_pages the number of slots.
"""

from dataclasses import dataclass

LAYOUTS = ("slots",)
# Bytes of an element. bfloat16 is no numpy dtype, so sizes are looked up by name.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class KVSpec:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens of one page; the context where layout is "slots"
    num_pages: int  # the number of slots where layout is "slots"
    dtype: str  # float32 | bfloat16
    layout: str = "slots"

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"KVSpec.layout={self.layout!r} is unknown; use one of {LAYOUTS}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"KVSpec.dtype={self.dtype!r} is unknown; use one of {tuple(DTYPE_BYTES)}"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one layer's k, and of its v: [pages, tokens of a page, kv heads, head_dim]."""
        return (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of `shape`, for the sharding rules of a server."""
        return ("slots", None, "kv_heads", "head_dim")

    def prefix_shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Of one layer's k, and of its v, in a Prefix of num_tokens (padded) tokens."""
        return (num_tokens, self.num_kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of k and v of one token over all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * per_layer

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, all shards together."""
        return self.token_bytes * self.num_pages * self.page_size

    def same_tokens(self, other: "KVSpec") -> bool:
        """True where a token's KV of one cache means the same in the other, whatever their sizes."""
        mine = (self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)
        return mine == (other.num_layers, other.num_kv_heads, other.head_dim, other.dtype)
