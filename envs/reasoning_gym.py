"""Any dataset of reasoning-gym by name, or a mixture of several: one question, one answer, the dataset's own score.

Splits are disjoint by question text: `eval` is the first eval_size distinct questions of a stream of its own seed, and
`train` is indices 0..size-1 of the stream of `seed` without the questions of `eval`. Another seed alone does not
separate them: most datasets make item i from seed + i, so the streams of neighbouring seeds are one stream, shifted.

A Task holds where its item comes from (dataset, config, seed, index), and reset() makes the item again: metadata of
any type reaches the dataset's scorer as the dataset made it.

Reward is dataset.score_answer, in 0..1; many datasets give part of it to an answer that contains the right one.
Scorers of some datasets parse the answer with sympy, which evaluates it: that happens in the worker process only.

Must not: be imported by the driver (reasoning_gym takes seconds to import).
"""

import functools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import reasoning_gym

from envs import read_config
from envs.splits import check_split
from rl_jax.types import Action, Message, StepResult, Task

# The part of a question that differs between items, for `bare`; group 1. For other datasets set question_pattern.
BARE_PATTERNS: dict[str, str] = {
    "chain_sum": r"problem: (.*)",
    "gcd": r"numbers: (.*?)\.",
    "products": r"multiplication: (.*?)\.",
    "spell_backward": r"\): (.*)",
}
EVAL_SEED_STEP = (
    1_000_003  # seed of eval = seed + this: beyond any size, so that shifted streams do not meet
)
SYSTEM = "Think about the question step by step, then give the final answer alone between <{tag}> and </{tag}>."
EVAL_TRIES = 20  # items drawn per wanted evaluation question before the dataset is called too small


@dataclass(frozen=True)
class ReasoningGymConfig:
    dataset: str = "chain_sum"  # a name of reasoning_gym's datasets
    dataset_config: Mapping[str, Any] = field(
        default_factory=dict
    )  # keyword arguments of that dataset
    size: int = 500  # training items before those of eval are left out
    eval_size: int = 64  # distinct evaluation questions
    seed: int = 0
    bare: bool = False  # the question without its fixed sentences, for models that read characters
    question_pattern: str = (
        ""  # regular expression whose group 1 is the bare question; "" = BARE_PATTERNS
    )
    # several datasets in one source: name -> its weight, or {"weight": ..., "config": the dataset's keyword arguments}
    mixture: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = "{question}"  # the user message
    # the system message; "" = none, or with answer_tag one that asks for it
    system: str = ""
    # for models that talk: the answer is what stands between <answer_tag> and </answer_tag> last; "" = answer_pattern
    answer_tag: str = ""
    # What a script that does not solve says; {answer} stands for the right answer ("{answer} ?" hedges: the scripts
    # teach the answer, RL to commit to it). "" = a wrong answer near the right one, which costs a model that learns
    # from the scripts much of what the right ones teach.
    script_miss: str = ""
    answer_pattern: str = (
        ""  # regular expression; the last match's group 1 is the answer; "" = the stripped text
    )

    def __post_init__(self):
        if self.size < 1 or self.eval_size < 1:
            raise ValueError(
                f"reasoning_gym: size={self.size} and eval_size={self.eval_size} must be at least 1"
            )
        if "{question}" not in self.prompt:
            raise ValueError(f"reasoning_gym: prompt={self.prompt!r} must hold {{question}}")
        if self.script_miss.strip() == "{answer}":
            raise ValueError(
                f"reasoning_gym: script_miss={self.script_miss!r} is the right answer; add what spoils it"
            )
        if self.mixture and (self.dataset_config or self.dataset != "chain_sum"):
            raise ValueError(
                "reasoning_gym: mixture names the datasets; leave dataset and dataset_config out"
            )
        if self.answer_tag and (self.answer_pattern or not self.answer_tag.isidentifier()):
            raise ValueError(
                f"reasoning_gym: answer_tag={self.answer_tag!r} must be a name, and leaves no place for answer_pattern"
            )
        for key in ("question_pattern", "answer_pattern"):
            pattern = getattr(self, key)
            if pattern and re.compile(pattern).groups < 1:
                raise ValueError(f"reasoning_gym: {key}={pattern!r} must have a group")
        if self.bare and not self.mixture and not self.bare_pattern:
            raise ValueError(
                f"reasoning_gym: bare has no pattern for dataset={self.dataset!r} (only for "
                f"{', '.join(sorted(BARE_PATTERNS))}); set question_pattern"
            )

    @property
    def bare_pattern(self) -> str:
        return self.question_pattern or BARE_PATTERNS.get(self.dataset, "")


class ReasoningGym:
    """One question; the episode ends with the first answer."""

    splits = ("train", "eval")

    def __init__(self):
        self._payload: Mapping[str, Any] = {}
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key, dataset or split, or a dataset with too few distinct questions."""
        config: ReasoningGymConfig = read_config(ReasoningGymConfig, cfg)
        check_split("reasoning_gym", split, cls.splits)
        if config.mixture:
            return [task for part in _parts(config) for task in cls.tasks(part, split)]
        held_out = _eval_items(config)
        if split == "eval":
            return [_make_task(config, split, *found) for found in held_out.values()]
        dataset = _dataset(config.dataset, _freeze(config.dataset_config), config.seed)
        items = ((i, dataset[i]) for i in range(config.size))
        kept = [(i, item) for i, item in items if item["question"] not in held_out]
        if not kept:
            raise ValueError(
                f"reasoning_gym: each of the size={config.size} training questions of {config.dataset} is one of the "
                f"eval_size={config.eval_size} evaluation questions; lower eval_size or widen dataset_config"
            )
        return [_make_task(config, split, i, item) for i, item in kept]

    def reset(self, task: Task, seed: int) -> StepResult:
        """Makes the item; its question already stands in task.messages, so there is nothing to add."""
        self._payload, self._is_solving = task.payload, None
        return StepResult((), state_key=task.id)

    def step(self, action: Action) -> StepResult:
        """Scores the answer; the episode is done."""
        score, answer = scored(self._payload, action.text)
        info = {"success": float(score == 1.0), "no_answer": float(answer is None)}
        return StepResult((), score, True, info=info)

    def close(self) -> None:
        self._payload = {}

    def script(self, rng: random.Random, skill: float) -> str:
        """The right answer in a share `skill` of all episodes, else `script_miss`, or a wrong answer near it.

        Raises: ValueError for datasets that hold no answer (they can only score one).
        """
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        payload = self._payload
        dataset, item = _item(payload)
        frame = "<{tag}>{answer}</{tag}>" if payload["answer_tag"] else "{answer}"
        frame = frame.replace("{tag}", payload["answer_tag"])
        if item["answer"] is None:
            raise ValueError(
                f"dataset {payload['dataset']} holds no answers to script; set warm_start.steps=0"
            )
        right = str(item["answer"])
        if self._is_solving:
            return frame.replace("{answer}", right)
        miss = payload["script_miss"].replace("{answer}", right)
        miss = miss or near_miss(right, rng, lambda i: str(dataset[i]["answer"]))
        return frame.replace("{answer}", miss)


def scored(payload: Mapping[str, Any], text: str) -> tuple[float, str | None]:
    """(the dataset's score of the answer in a text, 0..1; the answer, None if there is none)."""
    dataset, item = _item(payload)
    answer = extract_answer(text, payload["answer_pattern"])
    return dataset.score_answer(answer=answer, entry=item), answer


def extract_answer(text: str, pattern: str) -> str | None:
    """The answer in a text, None if there is none."""
    if not pattern:
        return text.strip() or None
    found = list(re.finditer(pattern, text))
    return found[-1].group(1).strip() if found else None


def near_miss(right: str, rng: random.Random, other) -> str:
    """A wrong answer: an integer moved by 1 to 9, else another item's answer (`other`: index -> text).

    Where ten other items all have the right answer too, one character of it is left out.
    """
    if re.fullmatch(r"-?\d+", right):
        return str(int(right) + rng.choice((-1, 1)) * rng.randint(1, 9))
    for _ in range(10):
        answer = other(rng.randrange(1000))
        if answer != right:
            return answer
    cut = rng.randrange(len(right)) if right else 0
    return right[:cut] + right[cut + 1 :]


@functools.lru_cache(maxsize=32)
def _dataset(name: str, frozen_config: tuple, seed: int):
    """A dataset object; its items are made on demand, at any index."""
    if name not in reasoning_gym.factory.DATASETS:
        raise ValueError(
            f"reasoning_gym has no dataset {name!r}; its datasets: {', '.join(sorted(reasoning_gym.factory.DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, **_thaw(frozen_config))
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym: dataset_config of {name}: {error}") from error


# A group's episodes ask for the same item one after the other, and some datasets take 0.1 s to make one.
@functools.lru_cache(maxsize=512)
def _cached_item(name: str, frozen_config: tuple, seed: int, index: int):
    dataset = _dataset(name, frozen_config, seed)
    return dataset, dataset[index]


def _item(payload: Mapping[str, Any]):
    """(dataset, item) of a task's payload."""
    return _cached_item(
        payload["dataset"], _freeze(payload["dataset_config"]), payload["seed"], payload["index"]
    )


def _eval_items(config: ReasoningGymConfig) -> dict[str, tuple[int, dict[str, Any]]]:
    """Question -> (index in the evaluation stream, item), of the first eval_size distinct questions."""
    dataset = _dataset(config.dataset, _freeze(config.dataset_config), config.seed + EVAL_SEED_STEP)
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for i in range(EVAL_TRIES * config.eval_size):
        item = dataset[i]
        found.setdefault(item["question"], (i, item))
        if len(found) == config.eval_size:
            return found
    raise ValueError(
        f"reasoning_gym: {config.dataset} has only {len(found)} distinct questions in {EVAL_TRIES * config.eval_size} "
        f"items, fewer than eval_size={config.eval_size}; lower eval_size or widen dataset_config"
    )


def _make_task(config: ReasoningGymConfig, split: str, index: int, item: Mapping[str, Any]) -> Task:
    question = item["question"]
    if config.bare:
        found = re.search(config.bare_pattern, question, re.DOTALL)
        if not found:
            raise ValueError(
                f"reasoning_gym: question_pattern={config.bare_pattern!r} is not in the question {question[:200]!r}"
            )
        question = found.group(1)
    tag = config.answer_tag
    system = config.system or (SYSTEM.replace("{tag}", tag) if tag else "")
    pattern = f"(?s)<{tag}>(.*?)</{tag}>" if tag else config.answer_pattern
    return Task(
        id=f"{config.dataset}/{split}/{config.seed}-{index}",
        env="reasoning_gym",
        tag="reasoning_gym",
        messages=(
            *([Message("system", system)] if system else []),
            Message("user", config.prompt.replace("{question}", question)),
        ),
        payload={
            "dataset": config.dataset,
            "dataset_config": dict(config.dataset_config),
            "seed": config.seed if split == "train" else config.seed + EVAL_SEED_STEP,
            "index": index,
            "answer": None if item["answer"] is None else str(item["answer"]),
            "answer_pattern": pattern,
            "answer_tag": tag,
            "script_miss": config.script_miss,
        },
        reward="env",
        max_turns=1,
    )


def _parts(config: ReasoningGymConfig) -> list[dict[str, Any]]:
    """The config of each dataset of a mixture, with its share of both sizes, at least one item."""
    entries = {
        name: dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        for name, entry in config.mixture.items()
    }
    for name, entry in entries.items():
        weight = entry.get("weight", 1.0)
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf or entry.keys() - {"weight", "config"}:
            raise ValueError(
                f"reasoning_gym: mixture.{name} must be a weight above 0, or weight and config of the dataset"
            )
    total = sum(entry.get("weight", 1.0) for entry in entries.values())
    shared = {f.name: getattr(config, f.name) for f in fields(config)}
    parts = []
    for name, entry in entries.items():
        share = entry.get("weight", 1.0) / total
        parts.append(
            shared
            | {"mixture": {}, "dataset": name, "dataset_config": entry.get("config", {})}
            | {key: max(1, round(shared[key] * share)) for key in ("size", "eval_size")}
        )
    return parts


def _freeze(value: Any) -> Any:
    """A hashable form of a JSON value, for the caches."""
    if isinstance(value, Mapping):
        return ("map", tuple((key, _freeze(item)) for key, item in sorted(value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(_freeze(item) for item in value))
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, tuple):
        kind, items = value
        return (
            {key: _thaw(item) for key, item in items}
            if kind == "map"
            else [_thaw(i) for i in items]
        )
    return value
