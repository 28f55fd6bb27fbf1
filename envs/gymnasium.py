"""Any gymnasium environment with discrete actions whose observations can be said in text.

What the policy sees, by `observe`: "text" an observation that is text, or numbers written out; "ansi" what
render_mode="ansi" draws, with what is coloured written as [red X]; "auto" text where the observation space is Text,
else ansi where the environment has it, else numbers. Before the first, in the same message, `instructions`. What it
says: the name of an action as a word (`actions`; by default the numbers 0, 1, ...), the last one of the text. A text
without one is an invalid move: it costs a turn, changes nothing and is counted in info["invalid_moves"]. The reward is
the environment's.

A task is a seed of the environment's reset(); splits as seeds.py. Environments with a table of transitions (toy_text)
have a script, the best policy by value iteration; of others a warm start is refused.
The environment is anybody's code, imported by its id ("module:Name-v0" imports the module first).
Must not: keep anything between episodes.
"""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs import read_config
from envs.seeds import SPLIT_BY, seeded_tasks, split_seeds
from envs.splits import check_split
from rl_jax.types import Action, Message, StepResult, Task

COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.S)
COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")  # 30..37, 40..47
OBSERVE = ("auto", "text", "ansi")
MAX_NUMBERS = 256  # of one observation that is written out
SWEEPS, GAMMA = 200, 0.99  # of value iteration: enough for the longest ways of toy_text

INSTRUCTIONS = "Answer with one of these actions: {actions}."


@dataclass(frozen=True)
class GymnasiumConfig:
    id: str = ""  # of a registered environment, such as Taxi-v4 (gymnasium renames versions)
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of gymnasium.make
    actions: tuple[str, ...] = ()  # their names; () = 0, 1, ...
    observe: str = "auto"  # auto | text | ansi
    num_tasks: int = 64  # of train
    eval_size: int = 32
    seed: int = 0
    split_by: str = "observation"  # observation | seed, as seeds.py
    max_turns: int = 32
    instructions: str = INSTRUCTIONS  # {actions} = their names; "" = the observation alone

    def __post_init__(self):
        if not self.id or not isinstance(self.id, str):
            raise ValueError(
                f"gymnasium: id={self.id!r} names no environment; give one of gymnasium's registry, such as Taxi-v4"
            )
        if min(self.num_tasks, self.eval_size, self.max_turns) < 1 or self.seed < 0:
            raise ValueError(
                f"gymnasium: num_tasks={self.num_tasks}, eval_size={self.eval_size} and max_turns={self.max_turns} must"
                f" be at least 1, seed={self.seed} at least 0"
            )
        for name, known in (("observe", OBSERVE), ("split_by", SPLIT_BY)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"gymnasium: {name}={getattr(self, name)!r} is not one of {', '.join(known)}"
                )


class Gymnasium:
    """One live episode of one environment."""

    splits = ("train", "eval")

    def __init__(self):
        self._env: gymnasium.Env | None = None
        self._observe = "text"
        self._actions: list[str] = []
        self._state: Any = None
        self._invalid_moves = 0
        self._best: np.ndarray | None = None
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key, split or id, spaces that cannot be said in text, or too few tasks."""
        config: GymnasiumConfig = read_config(GymnasiumConfig, cfg)
        check_split("gymnasium", split, cls.splits)
        player = cls()
        try:
            payload = player._open(config)
            sizes = (config.num_tasks, config.eval_size)
            seeds = split_seeds(split, sizes, config.seed, config.split_by, player._begin)
        finally:
            player.close()
        return seeded_tasks("gymnasium", split, seeds, payload, config.max_turns)

    def reset(self, task: Task, seed: int) -> StepResult:
        """The first observation. The task's own seed decides all that is random."""
        self.close()
        payload = task.payload
        self._env = _make(payload["id"], payload["kwargs"], payload["observe"])
        self._observe, self._actions = payload["observe"], list(payload["actions"])
        self._invalid_moves, self._is_solving = 0, None
        text, intro = self._begin(payload["seed"]), payload["instructions"]
        first = Message("user", f"{intro}\n\n{text}" if intro else text)
        return StepResult((first,), state_key=_digest(text))

    def step(self, action: Action) -> StepResult:
        """One action. The last result of an episode (done) has no message: nobody reads it."""
        chosen, reward, done = self._parse(action.text), 0.0, False
        if chosen is None:
            self._invalid_moves += 1
        else:
            self._state, reward, terminated, truncated, _ = self._live().step(chosen)
            reward, done = float(reward), terminated or truncated
        info = {"invalid_moves": float(self._invalid_moves)}
        if done:
            return StepResult((), reward, True, info=info)
        text = self._text()
        return StepResult((Message("user", text),), reward, state_key=_digest(text), info=info)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = self._best = None

    def script(self, rng: random.Random, skill: float) -> str:
        """The best action by the table of transitions, in a share `skill` of all episodes; else a random one."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        if not self._is_solving:
            return rng.choice(self._actions)
        if self._best is None:
            table = getattr(self._live().unwrapped, "P", None)
            if not isinstance(table, Mapping):
                raise LookupError("no table of transitions; set script_episodes=0")
            self._best = best_actions(table)
        return self._actions[int(self._best[int(self._state)])]

    def _open(self, config: GymnasiumConfig) -> dict[str, Any]:
        """Make the environment that tasks are listed with; what of it each task holds."""
        if not isinstance(config.kwargs, Mapping):
            raise ValueError(f"gymnasium: kwargs={config.kwargs!r:.80} must be a mapping")
        self._observe = _way_to_observe(config)
        self._env = _make(config.id, config.kwargs, self._observe)
        space = self._env.action_space
        if not isinstance(space, spaces.Discrete):
            raise ValueError(
                f"gymnasium: {config.id} has actions {space}; only Discrete ones can be named by a word"
            )
        names = list(config.actions) or [str(i) for i in range(int(space.n))]
        if len(names) != space.n or len({name.lower() for name in names}) != len(names):
            raise ValueError(
                f"gymnasium: actions={tuple(names)} must be {space.n} different names for the actions of {config.id}"
            )
        self._actions = names
        return {
            "id": config.id,
            "kwargs": dict(config.kwargs),
            "observe": self._observe,
            "actions": names,
            "instructions": config.instructions.replace("{actions}", ", ".join(names)),
        }

    def _begin(self, seed: int) -> str:
        self._state, _ = self._live().reset(seed=seed)
        return self._text()

    def _parse(self, text: str) -> int | None:
        """The index of the last name of an action that stands in the text as a word."""
        names = "|".join(re.escape(name) for name in sorted(self._actions, key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{names})(?!\w)", text, re.I)
        lowered = [name.lower() for name in self._actions]
        return lowered.index(found[-1].lower()) if found else None

    def _text(self) -> str:
        if self._observe == "ansi":
            return COLOURED.sub(_told, str(self._live().render())).strip("\n")
        return observed(self._state)

    def _live(self) -> gymnasium.Env:
        assert self._env is not None, "reset() comes before everything else"
        return self._env


def observed(state: Any) -> str:
    """An observation as text: itself, or its numbers. Raises ValueError: more than MAX_NUMBERS of them."""
    if isinstance(state, str):
        return state
    if isinstance(state, Mapping):
        return "\n".join(f"{name}: {observed(part)}" for name, part in state.items())
    if isinstance(state, tuple | list):
        return " ".join(observed(part) for part in state)
    numbers = np.asarray(state)
    if numbers.size > MAX_NUMBERS:
        raise ValueError(
            f"gymnasium: an observation of {numbers.size} numbers is no text; at most {MAX_NUMBERS} are written out,"
            " use observe=ansi or another environment"
        )
    return " ".join(f"{number:.4g}" for number in numbers.ravel().tolist())


def best_actions(table: Mapping[int, Mapping[int, Sequence[Any]]]) -> np.ndarray:
    """i64[states]: the best action in each, by value iteration. table: P[state][action] = [(p, next, reward, done)]."""
    values = np.zeros(len(table))
    worth = np.zeros((len(table), len(table[0])))
    for _ in range(SWEEPS):
        for state, actions in table.items():
            for action, ways in actions.items():
                worth[state, action] = sum(
                    p * (reward + GAMMA * values[to] * (not done)) for p, to, reward, done in ways
                )
        if np.abs(worth.max(1) - values).max() < 1e-6:
            break
        values = worth.max(1)
    return worth.argmax(1)


def _way_to_observe(config: GymnasiumConfig) -> str:
    try:
        spec = gymnasium.spec(config.id)
    except (gymnasium.error.Error, ImportError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"gymnasium: id={config.id!r} cannot be found: {said}") from None
    if config.observe != "auto":
        return config.observe
    env = gymnasium.make(spec, **config.kwargs)
    is_text = isinstance(env.observation_space, spaces.Text)
    has_ansi = "ansi" in (env.metadata.get("render_modes") or ())
    env.close()
    return "ansi" if has_ansi and not is_text else "text"


def _make(id_: str, kwargs: Mapping[str, Any], observe: str) -> gymnasium.Env:
    how = {"render_mode": "ansi"} if observe == "ansi" else {}
    # The task's max_turns is the limit.
    return gymnasium.make(id_, **{"max_episode_steps": -1, **how, **kwargs})


def _told(found: re.Match) -> str:
    """A coloured piece with its colour's name: in some games only that says where the player is."""
    codes = [int(code) for code in found[1].split(";") if code]
    names = [COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < 8]
    return f"[{names[0]} {found[2]}]" if names else found[2]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
