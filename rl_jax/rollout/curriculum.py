"""Which tag the next task is of, by what training made of the last ones: a bandit over the tags (DUMP).

A tag's score is the mean |advantage| of its last `window` trained episodes, and a bonus that grows while others are
seen; the next tag is drawn by the softmax of the scores. With a curriculum a batch is one share: its groups may be of
any tags (ANY), and admission, filling and taking count groups whatever their tag.
State is what a checkpoint keeps: windows, counts, and how many were drawn; a draw depends on the seed and its number
alone. Evaluation never feeds it. Source: arXiv:2504.09710. Differs: `floor` of the draws are uniform, so that no tag is
ever given up; the advantages are those that trained (under an estimator without std they keep the reward's scale).
Must not: know a task, or be used from two threads at once (`probs` may be read from any).
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rl_jax.algorithms.curriculum import dump_probs
from rl_jax.settings import CurriculumSettings, Settings

ANY = "*"  # in place of a tag, where groups of every tag are alike


class Bandit:
    def __init__(self, tags: Sequence[str], seed: int, settings: CurriculumSettings):
        self._settings, self._seed = settings, seed
        self._recent: dict[str, deque[float]] = {tag: deque(maxlen=settings.window) for tag in tags}
        self._num_seen = dict.fromkeys(tags, 0)
        self._num_drawn = 0
        self.probs = self._probs()  # tag -> share of the next draws

    def draw(self) -> str:
        """The tag of the next task."""
        digest = hashlib.blake2b(f"{self._seed}/{self._num_drawn}".encode(), digest_size=8).digest()
        self._num_drawn += 1
        place = np.random.default_rng(int.from_bytes(digest)).random()
        ends = np.cumsum(list(self.probs.values()))
        return list(self.probs)[min(int(np.searchsorted(ends, place)), len(ends) - 1)]

    def saw(self, advantages: Mapping[str, Sequence[float]]) -> None:
        """By tag the mean advantage over the tokens of each episode that was trained."""
        for tag, values in advantages.items():
            self._recent[tag].extend(values)
            self._num_seen[tag] += len(values)
        self.probs = self._probs()

    def state(self) -> dict[str, Any]:
        """JSON."""
        recent = {tag: list(values) for tag, values in self._recent.items()}
        return {"recent": recent, "seen": dict(self._num_seen), "drawn": self._num_drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where state() of a bandit over the same tags was taken."""
        for tag, values in state["recent"].items():
            self._recent[tag] = deque(values, self._settings.window)
        self._num_seen, self._num_drawn = dict(state["seen"]), state["drawn"]
        self.probs = self._probs()

    def _probs(self) -> dict[str, float]:
        s, counts = self._settings, np.array(list(self._num_seen.values()))
        recent = [list(values) for values in self._recent.values()]
        probs, _, _ = dump_probs(recent, counts, window=s.window, tau=s.tau, floor=s.floor)
        return dict(zip(self._recent, probs.tolist()))


def curriculum_errors(s: Settings) -> Iterator[str]:
    """What is wrong with a config's curriculum, one line each."""
    c, off, f = s.tasks.curriculum, CurriculumSettings(), s.algorithm.filter
    if c.name == "none":
        for name in ("window", "tau", "floor"):
            if getattr(c, name) != getattr(off, name):
                yield (
                    f"tasks.curriculum.{name}={getattr(c, name)} has no effect while tasks.curriculum.name is none;"
                    " set it to dump"
                )
        return
    what = f"tasks.curriculum.name={c.name}"
    if len(s.tasks.sources) < 2:
        yield f"{what} chooses between tags, and tasks.sources has one; give several sources, or set it to none"
    if f.equal_rewards or f.mean_above is not None or f.mean_below is not None:
        yield (
            f"{what} learns from what is trained, so groups that algorithm.filter drops teach it nothing and their tag"
            " would be drawn on and on; leave the group filters out: it draws flat tags less by itself"
        )
