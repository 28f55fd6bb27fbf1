"""What a process holds, counted exactly: to see that a run that goes on does not grow.

Counts in a run whose parts work beside each other differ from step to step by what is in flight, so two stretches are
compared by their least counts: what grows, grows there too. Must not: start or stop anything.
"""

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

LOOKS, LOOK_S = 10, 0.002
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def process_counts() -> Counter[str]:
    """Threads, open files, children, live device arrays and their bytes: the least of several looks, since a server's
    whole state exists twice for a moment whenever it is donated.
    """
    looks = []
    for _ in range(LOOKS):
        looks.append(_look())
        time.sleep(LOOK_S)
    return least(looks)


def _look() -> Counter[str]:
    arrays = jax.live_arrays()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return Counter(
        {
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "children": len(children.read_text().split()) if children.exists() else 0,
            "arrays": len(arrays),
            "array_bytes": sum(array.nbytes for array in arrays),
        }
    )


def object_counts() -> Counter[str]:
    """Objects that the garbage collector knows, by type, after a collection."""
    gc.collect()
    return Counter(f"object {type(x).__module__}.{type(x).__qualname__}" for x in gc.get_objects())


def driver_counts(driver: Any) -> Counter[str]:
    """What the parts of a job's Driver hold that belongs to episodes under way."""
    parts = driver.parts
    rollout = parts.rollout
    return Counter(
        {
            "tasks": len(asyncio.all_tasks(rollout._loop)),
            "live groups": len(rollout._dispatcher._groups),
            "buffered groups": parts.buffer.num_waiting + parts.buffer.num_taken,
            "live slots": rollout._slots.num_live,
            "open ledger entries": len(parts.ledger._open),
            "sessions of the router": len(rollout.sampler._sessions),
            "flights of the router": len(rollout.sampler._flights),
            "prefixes that the router waits for": len(rollout.sampler._computing),
        }
    )


def least(counts: Sequence[Mapping[str, int]]) -> Counter[str]:
    """The least of each name; 0 where one does not have it."""
    names = set().union(*counts)
    return Counter({name: min(one.get(name, 0) for one in counts) for name in names})


def growth(counts: Sequence[Mapping[str, int]], objects: int = 0) -> dict[str, int]:
    """What the second half of a run has at least more than the first half had at least, by name.

    objects: of one type may be more without being told; some are in flight.
    """
    half = len(counts) // 2
    early, late = least(counts[:half]), least(counts[half:])
    more = {name: late[name] - early[name] for name in sorted(late)}
    return {name: n for name, n in more.items() if n > objects * name.startswith("object ")}
