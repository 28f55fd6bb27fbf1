"""Nim in text, for two: a policy per side and credit per side.

Heaps A, B, C, ... hold objects; who is to move takes any number from one heap ("B2"), and who takes the last object
wins. Sides are called "first" (who moves first) and "second". The whole state is seen by both, so one conversation is
enough for both: a turn is of the side that StepResult.to_agent named before it, and Trajectory.roles keeps that for
every turn.

`opponent`, of train's episodes:
    self       the policy plays both sides (self-play)
    random     a scripted player that takes anything is the other side
    perfect    a scripted player that wins wherever it can is the other side
    endpoint   a policy that does not change, such as a past checkpoint, is the other side (opponents.py); where it says
               no legal move a random one is made for it, which is counted (info["opponent_slips"])
Where the other side is not the policy, positions are those that the policy's side can win. `eval` always has the
perfect opponent and such positions, so that a reward of 1 there says that the policy played without a mistake.

Credit: the winner +1, the loser -1. A text without a legal move forfeits: that side gets -1, the other 0, since it won
nothing by its play. What a side gets stands in info["reward/first"] and info["reward/second"] of the last step, which
makes it the part of the episode's reward that has the side's name: algorithms by role (role_ema, role_groups) train
each side's turns on its own part. The reward of the whole episode is the sum over the sides that the policy played: in
self-play 0 for a played game and -1 for a forfeit; against an opponent +1 or -1. An algorithm that knows no roles sees
only this sum, so self-play needs one by role.

Splits share no position (heaps in any order are one position); both depend on the seed alone.
Must not: keep anything between episodes.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envs import read_config
from envs.opponents import EndpointConfig, ask
from envs.splits import check_split
from rl_jax.types import Action, Message, StepResult, Task

SIDES = ("first", "second")
OPPONENTS = ("self", "random", "perfect", "endpoint")
NAMES = "ABCDEFGH"
MOVE = re.compile(r"(?<![\w'])([A-H])\s*(\d{1,3})(?!\w)", re.I)

INSTRUCTIONS = (
    "Two players take objects from heaps in turn: any number from one heap. Who takes the last object wins. Answer with"
    " a heap and a number, such as {example}."
)


@dataclass(frozen=True)
class TwoPlayerConfig:
    opponent: str = "self"  # self | random | perfect | endpoint
    endpoint: Mapping[str, Any] = field(
        default_factory=dict
    )  # of opponent=endpoint: EndpointConfig
    num_heaps: int = 3  # 1..8
    max_heap: int = 7  # objects
    num_tasks: int = 32  # of train
    eval_size: int = 16
    seed: int = 0
    instructions: str = INSTRUCTIONS  # {example} = a move; "" = the heaps alone

    def __post_init__(self):
        if self.opponent not in OPPONENTS:
            raise ValueError(
                f"two_player: opponent={self.opponent!r} is not one of {', '.join(OPPONENTS)}"
            )
        if (self.opponent == "endpoint") != bool(self.endpoint):
            raise ValueError(
                f"two_player: endpoint={dict(self.endpoint)!r:.80} with opponent={self.opponent!r}; the keys of"
                " endpoint are what opponent=endpoint needs, and nothing else reads them"
            )
        if not 1 <= self.num_heaps <= len(NAMES) or not 1 <= self.max_heap <= 99:
            raise ValueError(
                f"two_player: num_heaps={self.num_heaps} must be in 1..{len(NAMES)} and max_heap={self.max_heap}"
                " in 1..99"
            )
        if min(self.num_tasks, self.eval_size) < 1:
            raise ValueError(
                f"two_player: num_tasks={self.num_tasks} and eval_size={self.eval_size} must be at least 1"
            )


class TwoPlayer:
    """One live game."""

    splits = ("train", "eval")

    def __init__(self):
        self._heaps: list[int] = []
        self._to_move = SIDES[0]
        self._sides: tuple[str, ...] = SIDES  # that the policy plays
        self._opponent, self._rng = "self", random.Random(0)
        self._instructions = ""
        self._endpoint: EndpointConfig | None = None
        self._num_slips = 0  # of the endpoint: no legal move
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key or split, or more positions than there are."""
        config: TwoPlayerConfig = read_config(TwoPlayerConfig, cfg)
        check_split("two_player", split, cls.splits)
        positions = _positions(config)
        if split == "eval":
            chosen, opponent = positions[: config.eval_size], "perfect"
        else:
            chosen, opponent = positions[config.eval_size :], config.opponent
        return [_task(config, split, i, heaps, opponent) for i, heaps in enumerate(chosen)]

    def reset(self, task: Task, seed: int) -> StepResult:
        """The position; where the scripted side moves first, after its move. `seed`: of a random opponent."""
        payload = task.payload
        self._heaps, self._to_move = list(payload["heaps"]), SIDES[0]
        self._sides, self._opponent = tuple(payload["sides"]), payload["opponent"]
        self._rng, self._is_solving = random.Random(f"{seed}/{task.id}"), None
        endpoint = payload.get("endpoint")
        self._endpoint, self._num_slips = EndpointConfig(**endpoint) if endpoint else None, 0
        self._instructions = payload["instructions"]
        said = [self._instructions] if self._instructions else []
        if self._to_move not in self._sides:
            said.append(self._answer())
        return self._seen("\n\n".join([*said, self._position()]))

    def step(self, action: Action) -> StepResult:
        """The move of the side whose turn it is, and the scripted side's answer to it."""
        mover = self._to_move
        if not self._take(*parse_move(action.text)):
            return self._end({mover: -1.0, _other(mover): 0.0}, is_forfeit=True)
        if not any(self._heaps):
            return self._end({mover: 1.0, _other(mover): -1.0})
        said = []
        if self._to_move not in self._sides:
            said.append(self._answer())
            if not any(self._heaps):
                return self._end({mover: -1.0, _other(mover): 1.0})
        return self._seen("\n\n".join([*said, self._position()]), 0.0)

    def close(self) -> None:
        self._heaps = []

    def script(self, rng: random.Random, skill: float) -> str:
        """The best move of the side whose turn it is, in a share `skill` of all episodes; else no legal move."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        if not self._is_solving:
            return "pass"
        heap, number = best_move(self._heaps, rng)
        return f"{NAMES[heap]}{number}"

    def _take(self, heap: int, number: int) -> bool:
        """Make a move of who is to move; False if it is against the rules."""
        if not 0 <= heap < len(self._heaps) or not 1 <= number <= self._heaps[heap]:
            return False
        self._heaps[heap] -= number
        self._to_move = _other(self._to_move)
        return True

    def _answer(self) -> str:
        """The scripted side moves; what is said of it."""
        mover = self._to_move
        heap, number = self._chosen()
        if not self._take(heap, number):
            self._num_slips += 1
            heap, number = self._any_move()
            self._take(heap, number)
        return f"The {mover} player takes {NAMES[heap]}{number}."

    def _chosen(self) -> tuple[int, int]:
        """The move that the other side wants, legal or not. Raises: ConnectionError where its endpoint has none."""
        if self._endpoint is not None:
            # The whole state is in the position, so what was said before is not repeated.
            text = "\n\n".join(filter(None, [self._instructions, self._position()]))
            return parse_move(
                ask(self._endpoint, [Message("user", text)], self._rng.getrandbits(31))
            )
        return (
            best_move(self._heaps, self._rng) if self._opponent == "perfect" else self._any_move()
        )

    def _any_move(self) -> tuple[int, int]:
        heap = self._rng.choice([i for i, size in enumerate(self._heaps) if size])
        return heap, self._rng.randint(1, self._heaps[heap])

    def _position(self) -> str:
        heaps = " ".join(f"{NAMES[i]}:{size}" for i, size in enumerate(self._heaps))
        return f"{heaps}\nYou are the {self._to_move} player."

    def _seen(self, text: str, reward: float | None = None) -> StepResult:
        return StepResult(
            (Message("user", text),), reward, state_key=self._key(), to_agent=self._to_move
        )

    def _end(self, credit: Mapping[str, float], is_forfeit: bool = False) -> StepResult:
        """The game is over: each of the policy's sides gets its own, the episode their sum."""
        own = {side: credit[side] for side in self._sides}
        info = {f"reward/{side}": value for side, value in own.items()}
        info |= {"forfeit": float(is_forfeit)}
        if self._endpoint is not None:
            info["opponent_slips"] = float(self._num_slips)
        if len(own) == 1:
            info["success"] = float(sum(own.values()) == 1.0)
        return StepResult((), sum(own.values()), True, info=info)

    def _key(self) -> str:
        return hashlib.sha256(f"{self._to_move} {sorted(self._heaps)}".encode()).hexdigest()[:16]


def parse_move(text: str) -> tuple[int, int]:
    """(heap, number) of the last move in the text; (-1, 0) without one."""
    found = MOVE.findall(text)
    return (NAMES.index(found[-1][0].upper()), int(found[-1][1])) if found else (-1, 0)


def best_move(heaps: Sequence[int], rng: random.Random) -> tuple[int, int]:
    """(heap, number) that leaves a nim-sum of 0, the only kind of move that wins; any legal one where there is none."""
    total = nim_sum(heaps)
    for i, size in enumerate(heaps):
        if size ^ total < size:
            return i, size - (size ^ total)
    return rng.choice([i for i, size in enumerate(heaps) if size]), 1


def nim_sum(heaps: Sequence[int]) -> int:
    """The exclusive or of all heaps: who is to move can win exactly if it is not 0."""
    total = 0
    for size in heaps:
        total ^= size
    return total


def _other(side: str) -> str:
    return SIDES[1 - SIDES.index(side)]


def _positions(config: TwoPlayerConfig) -> list[tuple[int, ...]]:
    """Distinct positions: first those of eval, then train's."""
    sizes = range(1, config.max_heap + 1)
    every = list(itertools.combinations_with_replacement(sizes, config.num_heaps))
    wanted = config.num_tasks + config.eval_size
    if len(every) < wanted:
        raise ValueError(
            f"two_player: num_heaps={config.num_heaps} of at most max_heap={config.max_heap} make {len(every)}"
            f" positions, num_tasks={config.num_tasks} and eval_size={config.eval_size} ask for {wanted}; lower these"
            " or raise those"
        )
    rng = random.Random(f"two_player/{config.seed}")
    return [tuple(rng.sample(heaps, len(heaps))) for heaps in rng.sample(every, wanted)]


def _task(
    config: TwoPlayerConfig, split: str, i: int, heaps: tuple[int, ...], opponent: str
) -> Task:
    winner = SIDES[0] if nim_sum(heaps) else SIDES[1]
    example = f"{NAMES[0]}1"
    endpoint = (
        asdict(read_config(EndpointConfig, config.endpoint)) if opponent == "endpoint" else None
    )
    return Task(
        id=f"{split}/{i}-{'-'.join(map(str, heaps))}",
        env="two_player",
        tag="two_player",
        messages=(),
        payload={
            "heaps": list(heaps),
            "opponent": opponent,
            "sides": list(SIDES) if opponent == "self" else [winner],
            "instructions": config.instructions.replace("{example}", example),
            **({"endpoint": endpoint} if endpoint else {}),
        },
        reward="env",
        max_turns=sum(heaps),
    )
