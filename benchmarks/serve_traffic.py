"""Traffic for servers: conversations made of a seed, and when each arrives. Plain numpy, no server and no clock.

A conversation is what one episode of a rollout asks for: an opening, then in turns what the model samples and what the
environment says. Three kinds of traffic are special cases: one turn of random tokens; one turn whose first tokens a
group shares, as the attempts at one task do; several turns, each of which sends the whole history again.
"""

from dataclasses import dataclass

import numpy as np

FIRST_TOKEN = 10  # below are a vocabulary's special tokens


@dataclass(frozen=True)
class Conversation:
    """max_new_tokens[i] bounds turn i; says[i], i32[n], is what the environment answers to turn i."""

    name: str
    opening: np.ndarray  # i32[n]
    max_new_tokens: tuple[int, ...]
    says: tuple[np.ndarray, ...]  # one fewer than turns
    seed: int  # of its sampling

    @property
    def num_tokens(self) -> int:
        """Of the whole history, if every turn is as long as it may be."""
        return len(self.opening) + sum(self.max_new_tokens) + sum(map(len, self.says))


@dataclass(frozen=True)
class Traffic:
    """num conversations: header tokens that each `group` in a row shares, `own` tokens, then turns.

    A turn samples output / 2 to output * 3 / 2 tokens, evenly spread, so that turns do not end in step; between two the
    environment says `says` tokens.
    """

    name: str
    num: int
    own: int
    output: int
    header: int = 0
    group: int = 1
    turns: int = 1
    says: int = 0

    def conversations(self, vocab_size: int, seed: int) -> list[Conversation]:
        """The same ones for the same seed; of different seeds no tokens are shared."""
        rng = np.random.default_rng(seed)
        draw = lambda n: rng.integers(FIRST_TOKEN, vocab_size, n).astype(np.int32)
        low, high = max(1, self.output // 2), max(1, self.output * 3 // 2)
        made, header = [], draw(0)
        for i in range(self.num):
            if i % self.group == 0:
                header = draw(self.header)
            outputs = tuple(rng.integers(low, high + 1, self.turns).tolist())
            says = tuple(draw(self.says) for _ in range(self.turns - 1))
            opening = np.concatenate([header, draw(self.own)])
            sampling = int(rng.integers(1 << 62))
            made.append(Conversation(f"{self.name}.{seed}.{i}", opening, outputs, says, sampling))
        return made

    @property
    def context(self) -> int:
        """Tokens that the longest history may have."""
        return (
            self.header
            + self.own
            + self.turns * (self.output * 3 // 2)
            + (self.turns - 1) * self.says
        )


def poisson(rate: float, num: int, seed: int) -> np.ndarray:
    """Seconds from the start, f64[num] ascending, at which num arrivals of a Poisson process come. rate: per second."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num))
