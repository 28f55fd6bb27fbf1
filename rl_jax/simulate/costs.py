"""What a dispatch costs, by the shape of a model and the figures of a hardware class: a roofline.

A dispatch takes the longer of its operations at the class's rate and its bytes at the class's bandwidth. Operations:
two a weight and token, and four a head element and token that is attended to. Bytes: the weights once, and the KV that
is read. Both rates are the published peaks times the fractions that this system's engine reached of them on one card
(benchmarks/README.md), taken to be the same for all classes.
Must not: hold a figure without its source.
"""

from dataclasses import dataclass

# Of an H100's published peaks. Prefill: 0.69 of a product of 776 TFLOP/s (206,500 tokens/s); decode: 0.62 of a copy
# rate of 2.97 TB/s (256 slots). Both in benchmarks/README.md, for a model of 1.5 B weights.
COMPUTE_FRACTION = 0.69 * 776 / 989
BANDWIDTH_FRACTION = 0.62 * 2.97 / 3.35
LINK_BYTES_S = 50e9  # between servers of two hosts: one network card of 400 Gbit/s


@dataclass(frozen=True)
class Hardware:
    """One device of a class."""

    name: str
    flops_s: float  # dense bfloat16
    bytes_s: float  # of its memory
    memory_bytes: float
    price: float  # an hour, in those of an H20


# H800: an H100 SXM with slower links and no float64; 989 TFLOP/s dense, 3.35 TB/s, 80 GB (NVIDIA's H100 data sheet).
# H20: 148 TFLOP/s dense, 4.0 TB/s, 96 GB (no data sheet is public; as listed at willitrunai.com/gpus/h20-96gb).
# Prices: RollArt (arXiv:2512.22560) counts an H800 as 2.85 H20.
H800 = Hardware("H800", 989e12, 3.35e12, 80e9, 2.85)
H20 = Hardware("H20", 148e12, 4.0e12, 96e9, 1.0)
HARDWARE = {hardware.name: hardware for hardware in (H800, H20)}


@dataclass(frozen=True)
class ModelShape:
    """What of a model its costs depend on; bfloat16 throughout."""

    name: str
    body_params: float  # weights that every token meets
    head_params: float  # weights that a sampled token meets beside them
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        return 2 * (self.body_params + self.head_params)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_flops(self) -> float:
        """Of one token that attends to one other."""
        return 4.0 * self.layers * self.heads * self.head_dim


# Its model card: 8.2 B weights, 6.95 B of them no embeddings, 36 layers, 32 heads over 8.
QWEN3_8B = ModelShape("Qwen3-8B", 6.95e9, 0.62e9, 36, 32, 8, 128)


@dataclass(frozen=True)
class Costs:
    """Seconds of a server of one device."""

    hardware: Hardware
    model: ModelShape

    def chunk_s(self, num_tokens: int, attended: int, num_read: int) -> float:
        """A chunk of a prefill. attended: over its tokens, how many each sees; num_read: tokens whose KV is read."""
        model = self.model
        flops = 2.0 * model.body_params * num_tokens + model.attention_flops * attended
        num_bytes = 2 * model.body_params + model.kv_token_bytes * num_read
        return self._longer_s(flops, num_bytes)

    def decode_s(self, num_steps: int, num_slots: int, num_context: int) -> float:
        """A block of decode steps. num_slots: that generate; num_context: tokens of their histories together."""
        model = self.model
        flops = 2.0 * (model.body_params + model.head_params) * num_slots
        flops += model.attention_flops * num_context
        return num_steps * self._longer_s(
            flops, model.weight_bytes + model.kv_token_bytes * num_context
        )

    def move_s(self, num_tokens: int) -> float:
        """KV of so many tokens on its way to another server."""
        return self.model.kv_token_bytes * num_tokens / LINK_BYTES_S

    def num_pages(self, page_size: int) -> int:
        """Pages of KV beside the weights, in nine tenths of the memory."""
        left = 0.9 * self.hardware.memory_bytes - self.model.weight_bytes
        return int(left // (self.model.kv_token_bytes * page_size))

    def _longer_s(self, flops: float, num_bytes: float) -> float:
        compute_s = flops / (self.hardware.flops_s * COMPUTE_FRACTION)
        return max(compute_s, num_bytes / (self.hardware.bytes_s * BANDWIDTH_FRACTION))
