"""TaskStream: an endless, checkpointable order in which the tasks of several sources are issued.

Owns: how many tasks each tag has issued; its whole state is these counts. Each source is a grain dataset of indices
that is random access, so a count is a position and restoring costs nothing.

Invariants
    Every epoch of a tag issues each of its tasks exactly once, in an order of its own that depends on the seed, the
    tag and the epoch only. Epochs are counted per tag.
    index = (sizes of the sources before this one) + (the task's place in its source): unique across tags, the same in
    every epoch. So (epoch, index) names an issued task, and a uid is run/epoch/index/sample.
    Without a wish, the tag that the curriculum draws is next; without one, that with the fewest issued so far, in the
    order of the sources: round robin.

Must not: import an environment (task lists come ready), or wait.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rl_jax.data.order import epoch_order
from rl_jax.rollout.curriculum import Bandit
from rl_jax.types import Task


class TaskError(ValueError):
    """The tasks are not those that were expected: none at all, or others than those of the run to go on with."""


class IssuedTask(NamedTuple):
    task: Task
    epoch: int  # of the task's tag, from 0
    index: int  # unique across tags


class TaskStream:
    """The order of tasks. One thread at a time; state() may be read from any."""

    def __init__(
        self,
        sources: Mapping[str, Sequence[Task]],
        seed: int,
        shuffle: bool = True,
        curriculum: Bandit | None = None,
    ):
        """sources: tag -> its tasks, in a fixed order. curriculum: over these tags.

        Raises: TaskError if there is no source or one without tasks.
        """
        empty = [tag for tag, tasks in sources.items() if not len(tasks)]
        if empty or not sources:
            raise TaskError(f"no tasks to train on: {', '.join(empty) or 'tasks.sources is empty'}")
        self._sources = dict(sources)
        self._seed, self._shuffle, self.curriculum = seed, shuffle, curriculum
        self._offsets: dict[str, int] = {}
        num_tasks = 0
        for tag, tasks in self._sources.items():
            self._offsets[tag] = num_tasks
            num_tasks += len(tasks)
        self.num_tasks = num_tasks
        self._order = {
            tag: self._index_dataset(tag, len(tasks)) for tag, tasks in self._sources.items()
        }
        self._digests = {tag: _digest(tasks) for tag, tasks in self._sources.items()}
        self._num_issued = dict.fromkeys(self._sources, 0)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def next(self, tag: str | None = None) -> IssuedTask:
        """The next task of a tag; without a tag, of the one that the curriculum draws, or that is behind.

        Raises: ValueError for an unknown tag.
        """
        if tag is None and self.curriculum is not None:
            tag = self.curriculum.draw()
        elif tag is None:
            tag = min(self._num_issued, key=lambda name: self._num_issued[name])
        elif tag not in self._sources:
            raise ValueError(
                f"no task source has tag {tag!r}; use one of {', '.join(self._sources)}"
            )
        position = self._num_issued[tag]
        self._num_issued[tag] = position + 1
        epoch = position // len(self._sources[tag])
        return self.task(epoch, self._offsets[tag] + self._order[tag][position])

    def task(self, epoch: int, index: int) -> IssuedTask:
        """The task that (epoch, index) names, issued or not: what was pending is issued again after a resume.

        Raises: ValueError for an index outside the sources.
        """
        for tag, tasks in self._sources.items():
            local = index - self._offsets[tag]
            if 0 <= local < len(tasks):
                return IssuedTask(tasks[local], epoch, index)
        raise ValueError(f"task index {index} is outside 0..{self.num_tasks - 1}")

    def state(self) -> dict[str, Any]:
        """JSON: the position of every tag, and what the order depends on."""
        tags = [
            {
                "tag": tag,
                "issued": issued,
                "size": len(self._sources[tag]),
                "digest": self._digests[tag],
            }
            for tag, issued in list(self._num_issued.items())
        ]
        state: dict[str, Any] = {"seed": self._seed, "shuffle": self._shuffle, "tags": tags}
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where state() was taken.

        Raises: TaskError if seed, order of the tags or any task list is not that of the state: the same indices would
        name other tasks.
        """
        now = self.state()
        for key in ("seed", "shuffle"):
            if now[key] != state[key]:
                raise TaskError(
                    f"the task stream was saved with {key}={state[key]}, not {now[key]}; restore it"
                )
        tags, saved_tags = ([entry["tag"] for entry in s["tags"]] for s in (now, state))
        if tags != saved_tags:
            raise TaskError(
                f"the task stream was saved with tags {', '.join(saved_tags)} in that order, not {', '.join(tags)}; "
                "restore tasks.sources, or start in a new --run_dir with --resume=PATH, which takes the weights alone"
            )
        for entry, saved in zip(now["tags"], state["tags"]):
            if (entry["size"], entry["digest"]) != (saved["size"], saved["digest"]):
                raise TaskError(
                    f"the {entry['size']} tasks of tag {entry['tag']!r} are not the {saved['size']} that the task "
                    "stream was saved with; restore its source's config, or, to take the weights alone to other tasks,"
                    " name their tag otherwise in a new --run_dir with --resume=PATH"
                )
        self._num_issued = {saved["tag"]: saved["issued"] for saved in state["tags"]}
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.restore(state["curriculum"])

    def _index_dataset(self, tag: str, size: int) -> Any:
        """Position -> index in the source, as an endless grain dataset.

        The permutation is ours: grain's own shuffle walks a cipher over 2^16 values down to the size of the source,
        4 ms an index for 16 tasks, on the thread that all episodes run on.
        """
        import grain  # takes seconds and pulls in jax, which those who only need IssuedTask must not pay for

        indices = grain.MapDataset.range(size).repeat()
        if not self._shuffle:
            return indices
        order = epoch_order(f"tasks/{self._seed}/{tag}", size)
        return indices.map_with_index(lambda position, index: int(order(position // size)[index]))


def _digest(tasks: Sequence[Task]) -> str:
    """Of ids and prompts."""
    digest = hashlib.sha256()
    for i in range(len(tasks)):
        said = [(message.role, message.content) for message in tasks[i].messages]
        digest.update(f"{tasks[i].id} {said}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]
