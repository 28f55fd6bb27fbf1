"""KVSpec: the one description of how a KV cache lies in memory.

The kernel that reads a cache picks its layout; engines, prefix transfer and memory plans take shapes
from the spec and hard-code nothing. Two caches may exchange pages when `same_pages` holds.
Layout "pages": per layer two separate arrays k and v, each [num_pages, page_size, num_kv_heads,
head_dim]. Which pages hold a context, and in which order, says its page table; NO_PAGE fills a table
behind the last one: what is written there is dropped, what is read there is masked by position.
"""

from dataclasses import dataclass, replace

LAYOUTS = ("pages",)
NO_PAGE = -1
# Bytes of an element. bfloat16 is no numpy dtype, so sizes are looked up by name.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class KVSpec:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens of one page
    num_pages: int
    dtype: str  # float32 | bfloat16
    layout: str = "pages"

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
        return ("pages", None, "kv_heads", "head_dim")

    def pages_of(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of k and v of one token over all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_layers * per_layer

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, all shards together."""
        return self.token_bytes * self.num_pages * self.page_size

    def same_pages(self, other: "KVSpec") -> bool:
        """True where a page of one cache means the same in the other, however many each has."""
        return replace(self, num_pages=other.num_pages) == other
