"""ExampleStream: batches of rows in a checkpointable order.

Owns: the position, which is grain's iterator state and the whole of state(). Invariants: each pass gives every row
exactly once, in an order of its own that depends on the seed and the pass only; a batch may end one pass and begin the
next, so no row sits out, and its trajectories' uids carry the pass; restore(state()) gives the batches that would have
come. With data.epochs passes the last batch may be short.
Several loaders: each takes one `shard` (i, n) of every pass; together they give every row once.
A batch that does not come within data.deadline_s ends the run: reading has a thread, which is then left behind.
Must not: render ahead of what its buffer holds.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from math import ceil
from typing import Any

from rl_jax.data.corpus import Rows
from rl_jax.data.order import epoch_order
from rl_jax.data.rows import DataError
from rl_jax.settings import DataSettings
from rl_jax.types import Group
from rl_jax.waits import Wait

BUFFERED = 2  # batches rendered ahead
# Rows of a stream without an end, which no run reaches. grain's own endless repeat has sys.maxsize of them, and its
# division by the size of a batch, in floats, may round above that; this is below what a float holds exactly.
MOST_ROWS = 2**52


class ExampleStream:
    """One thread at a time. `close` ends its own."""

    def __init__(
        self,
        rows: Rows,
        digest: str,
        settings: DataSettings,
        seed: int,
        shard: tuple[int, int] = (0, 1),
    ):
        """digest: of the rows. Raises DataError if a shard has no row."""
        import grain  # takes seconds and pulls in jax, which those who only read rows must not pay for

        index, num_shards = shard
        self._size = len(range(index, len(rows), num_shards))
        if not self._size:
            raise DataError(f"{len(rows)} rows are too few for {num_shards} loaders; give more")
        self._rows, self._settings = rows, settings
        self._about = {"digest": digest, "seed": seed, "shuffle": settings.shuffle,
                       "batch_rows": settings.batch_rows, "shard": list(shard)}  # fmt: skip
        order = epoch_order(f"rows/{seed}", len(rows))

        def group(position: int, place: int) -> Group:
            epoch = position // self._size
            row = int(order(epoch)[place]) if settings.shuffle else int(place)
            return in_epoch(rows[row], epoch)

        most_passes = MOST_ROWS // self._size
        places = grain.MapDataset.range(len(rows))[index::num_shards]
        batches = (
            places.repeat(min(settings.epochs or most_passes, most_passes))
            .map_with_index(group)
            .batch(settings.batch_rows, batch_fn=list)
        )
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BUFFERED)
        self._iterator = iter(batches.to_iter_dataset(options))
        self._num_given = 0  # batches
        self._wait: Wait | None = None  # for a batch
        self._is_stuck = False

    def next(self) -> list[Group]:
        """The next batch. Raises DataError behind the last of data.epochs or after data.deadline_s, and what reading a
        row raises."""
        limit = f"data.deadline_s={self._settings.deadline_s:g}"
        self._wait = Wait(f"batch {self._num_given + 1} of rows", time.monotonic(), limit)
        reading: Future = Future()
        threading.Thread(target=self._read, args=(reading,), name="rows", daemon=True).start()
        try:
            groups = reading.result(self._settings.deadline_s)
        except FutureTimeout:
            if reading.done():
                raise
            self._is_stuck = True
            raise DataError(
                f"{self._wait.what} did not come within {limit}; is the file system of data.path stuck?"
            ) from None
        except StopIteration:
            raise DataError(
                f"data.epochs={self._settings.epochs} passes are over; raise it to train longer"
            ) from None
        finally:
            self._wait = None
        self._num_given += 1
        return groups

    def waits(self) -> list[Wait]:
        """The batch that is waited for. Any thread."""
        wait = self._wait
        return [] if wait is None else [wait]

    def _read(self, reading: Future) -> None:
        try:
            reading.set_result(next(self._iterator))
        except BaseException as error:  # handed to the thread that waits
            reading.set_exception(error)

    @property
    def epoch(self) -> float:
        """Passes given."""
        given = self._num_given * self._settings.batch_rows / self._size
        return min(given, float(self._settings.epochs)) if self._settings.epochs else given

    def state(self) -> dict[str, Any]:
        """JSON: the position, and what the order depends on."""
        return {**self._about, "batches": self._num_given, "iterator": self._iterator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where state() was taken. Raises: DataError if the same position would be another row."""
        for key, value in self._about.items():
            if state[key] != value:
                raise DataError(
                    f"the position in the data was saved with {key} {state[key]}, not {value}: the rows are others;"
                    " put them back, or start a new run"
                )
        self._iterator.set_state(state["iterator"])
        self._num_given = state["batches"]

    def close(self) -> None:
        """End its own threads, unless one of them is stuck."""
        if not self._is_stuck:
            self._iterator.close()


def in_epoch(group: Group, epoch: int) -> Group:
    """The group as of one pass, so that a batch may hold it twice. Its members keep `group` and `index`."""
    members = tuple(
        replace(member, uid=f"{epoch}/{member.uid}", epoch=epoch) for member in group.trajectories
    )
    return replace(group, uid=f"{epoch}/{group.uid}", epoch=epoch, trajectories=members)


def num_steps(num_rows: int, settings: DataSettings) -> int:
    """Batches of data.epochs passes."""
    return ceil(num_rows * settings.epochs / settings.batch_rows)
