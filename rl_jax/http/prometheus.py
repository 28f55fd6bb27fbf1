"""HttpMetrics: what the HTTP edge counts, as Prometheus text, under vLLM's names and ours.

Invariants: one writer, the event loop; every request adds to exactly one outcome; a histogram's buckets are cumulative.
Must not: label by anything that a client chooses.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rl_jax.exposition import Histogram, escaped


class HttpMetrics:
    def __init__(self, model: str):
        self._labels = f'model_name="{escaped(model)}"'
        self.finished: Counter[str] = Counter()  # choices, by finish
        self.answers: Counter[int] = Counter()  # requests, by status
        self.ends: Counter[str] = Counter()  # requests without an answer: disconnect, slow_reader
        self.errors: Counter[str] = (
            Counter()
        )  # by code: accepted requests that could not be sampled
        self.rejects = 0  # 429
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.ttft, self.tpot, self.e2e = Histogram(), Histogram(), Histogram()
        self.queue, self.prefill = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, float]) -> str:
        """gauges: of what is there now, by name."""
        lines: list[str] = []

        def tell(name: str, kind: str, rows: Iterable[tuple[str, Any]]) -> None:
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(f"{name}{{{labels}}} {value:.17g}" for labels, value in rows)

        for name, value in gauges.items():
            tell(name, "gauge", [(self._labels, value)])
        counters = {
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.generation_tokens,
            "vllm:prefix_cache_queries_total": self.prompt_tokens,
            "vllm:prefix_cache_hits_total": self.cached_tokens,
            "rl_jax:queue_rejects_total": self.rejects,
        }
        for name, value in counters.items():
            tell(name, "counter", [(self._labels, value)])
        families = (
            ("vllm:request_success_total", "finished_reason", self.finished),
            ("rl_jax:http_answers_total", "status", self.answers),
            ("rl_jax:aborts_total", "reason", self.ends),
            ("rl_jax:request_errors_total", "code", self.errors),
        )
        for name, label, counts in families:
            rows = [(f'{self._labels},{label}="{k}"', v) for k, v in sorted(counts.items())]
            tell(name, "counter", rows)
        histograms = {
            "vllm:time_to_first_token_seconds": self.ttft,
            "vllm:time_per_output_token_seconds": self.tpot,
            "vllm:e2e_request_latency_seconds": self.e2e,
            "vllm:request_queue_time_seconds": self.queue,
            "vllm:request_prefill_time_seconds": self.prefill,
        }
        for name, histogram in histograms.items():
            lines.append(f"# TYPE {name} histogram")
            lines += histogram.lines(name, self._labels)
        return "\n".join(lines) + "\n"
