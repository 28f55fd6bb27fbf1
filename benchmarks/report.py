"""What every benchmark shares: rows with predictions, saved as they come, and the card's own rates to compare with.

A row is a measurement beside its limit and the prediction written down before it was made. The JSON is written after
every row, so a run that is cut off keeps what it has.
"""

import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

LIBRARIES = ("jax", "jaxlib", "flax", "numpy")


def ran(libraries: Sequence[str] = ()) -> dict[str, Any]:
    """When, under which versions and by which command."""
    versions = {name: metadata.version(name) for name in libraries}
    return {
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "command": shlex.join(["python", *sys.argv]),
    }


class Report:
    """Rows of one benchmark; prints each as it comes, and all as a table last."""

    def __init__(self, path: Path, predictions: Mapping[str, float]):
        """predictions: row name -> milliseconds expected."""
        self.path, self.predictions = path, predictions
        self.rows: list[dict[str, Any]] = []
        self.head = {
            "card": card(),
            **ran(LIBRARIES),
        }

    def add(
        self, name: str, seconds: float, num_bytes: int = 0, limit_s: float = 0.0, **notes: Any
    ) -> dict[str, Any]:
        """num_bytes: moved, for GB/s; limit_s: what the hardware alone would take."""
        row: dict[str, Any] = {"name": name, "ms": round(seconds * 1e3, 3)}
        if num_bytes:
            row["gb"] = round(num_bytes / 1e9, 4)
            row["gb_per_s"] = round(num_bytes / 1e9 / seconds, 1)
        if limit_s:
            row["ratio_to_limit"] = round(seconds / limit_s, 3)
        if name in self.predictions:
            row["predicted_ms"] = self.predictions[name]
        row |= notes
        self.rows.append(row)
        self.save()
        print(json.dumps(row), flush=True)
        return row

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")

    def print_table(self) -> None:
        columns = ("name", "ms", "gb_per_s", "ratio_to_limit", "predicted_ms")
        cells = [columns, *([str(r.get(c, "")) for c in columns] for r in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        print(f"\n{self.head['card']}, {self.head['date']}, jax {self.head['versions']['jax']}")
        for row in cells:
            first, *rest = zip(row, widths, strict=True)
            print(first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest), sep="  ")


def median_s(run: Callable[[], Any], repeats: int = 5, warmup: int = 1) -> float:
    """Median seconds of run(), whose result is waited for and dropped. warmup calls compile."""
    for _ in range(warmup):
        jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_s_of(device: jax.Device, num_bytes: int) -> float:
    """Seconds in which a device reads num_bytes of its own memory and writes as many."""
    x = jax.device_put(jnp.ones((num_bytes // 4,), jnp.float32), device)
    copy = jax.jit(lambda x: x + 1)
    return median_s(lambda: copy(x))


def card() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"


def bytes_in_use(device: jax.Device) -> int:
    """0 where the backend does not say (CPU)."""
    return (device.memory_stats() or {}).get("bytes_in_use", 0)
