"""The peer of train_step.py: the same tokens through torch + transformers, sdpa, bfloat16, fused AdamW.

    python benchmarks/train_step_peer.py --shape 1.5b --row-tokens 4096 --rows 16 [--checkpointing]

Weights, gradients and moments are bfloat16 (this library's learner keeps float32 ones). The loss is the model's own
mean cross-entropy; gradients are clipped to norm 1. Microbatches of 1, 2 and 4 rows are tried, the fastest counts.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: E402

from benchmarks.train_step import SHAPES, model_flop  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--microbatch-rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict:
    s = SHAPES[args.shape]
    config = Qwen2Config(
        vocab_size=s.vocab_size, hidden_size=s.embed_size, intermediate_size=s.mlp_size,
        num_hidden_layers=args.layers or s.num_layers, num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_kv_heads, rope_theta=s.rope_theta, rms_norm_eps=s.norm_eps,
        tie_word_embeddings=s.tie_embeddings, max_position_embeddings=args.row_tokens, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        tokens = torch.randint(0, s.vocab_size, (args.rows, args.row_tokens))
    model.train()
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rate = matmul_rate()
    found = {}
    for size in args.microbatch_rows:
        torch.cuda.reset_peak_memory_stats()
        try:
            times = [step(model, optimizer, tokens, size) for _ in range(args.repeats + 1)][1:]
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            break
        found[size] = sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated()
    size = min(found, key=lambda n: found[n][0])
    num_weights = sum(p.numel() for p in model.parameters())
    return {
        "seconds": found[size][0],
        "flop": model_flop(s, num_weights, tokens.numel(), args.row_tokens),
        "rate": rate,
        "tokens": tokens.numel(),
        "peak_gb": round(found[size][1] / 1e9, 2),
        "microbatch_rows": size,
        "ms_by_rows": {n: round(t * 1e3, 1) for n, (t, _) in found.items()},
        "peak_gb_by_rows": {n: round(m / 1e9, 2) for n, (_, m) in found.items()},
        "torch": torch.__version__,
    }


def step(model, optimizer, tokens, size: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    parts = tokens.split(size)
    for part in parts:
        loss = model(input_ids=part, labels=part).loss / len(parts)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_rate(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 10)
    return 2 * size**3 / sorted(times[1:])[2]


if __name__ == "__main__":
    main()
