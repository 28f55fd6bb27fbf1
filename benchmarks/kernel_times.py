"""Where a program's time on a GPU goes: kernel times of one run, read from JAX's own trace."""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax


def kernel_times(run: Callable[[], object]) -> dict:
    """{"span_ms": first start to last end, "busy_ms": ..., "kernels": [[ms, count, operation, kernel], ...]}.

    The longest kernel first. operation: of the compiled program; its CUDA graph, where XLA made one of several.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(trace))
        spans, totals = [], defaultdict(lambda: [0.0, 0])
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    operation = str(dict(event.stats).get("hlo_op", ""))
                    spans.append((event.start_ns, event.start_ns + event.duration_ns))
                    total = totals[operation, event.name]
                    total[0] += event.duration_ns / 1e6
                    total[1] += 1
    rows = [[round(ms, 3), count, *key] for key, (ms, count) in totals.items()]
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(stop - max(start, end), 0)
        end = max(end, stop)
    first = min((start for start, _ in spans), default=0)
    return {
        "span_ms": round((end - first) / 1e6 if spans else 0.0, 2),
        "busy_ms": round(busy / 1e6, 2),
        "kernels": sorted(rows, reverse=True),
    }
