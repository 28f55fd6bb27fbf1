"""One episode as it is shown: who it is, its reward, and turn by turn what was seen, sampled and called.

Invariants: bounded whatever the line holds: MAX_TEXT characters of a text, MAX_TOKENS tokens of a turn and MAX_ALL of
an episode, and what is left out is counted beside it; text is the trace's own, pieces of tokens are decoded from its
ids; a token has a log-prob, an advantage and a version only where the trace has them.
Must not: escape: whoever shows it does that.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_jax.viewer.samples import SampleError, Samples

if TYPE_CHECKING:
    from rl_jax.viewer.tokens import Texts

MAX_TEXT = 20_000  # characters of one text
MAX_TOKENS = 4_000  # of one turn, in one answer
MAX_ALL = 40_000  # of one episode, in one answer
MAX_TURNS = 500
MAX_SCANNED = 512  # episodes of a step whose tool calls are counted
MAX_NAME = 300


def cut(text: Any, most: int = MAX_TEXT) -> dict[str, Any]:
    """{"text", "left_out": characters}."""
    text = text if isinstance(text, str) else str(text)
    return {"text": text[:most], "left_out": max(len(text) - most, 0)}


def short(text: Any) -> str:
    """A name, of at most MAX_NAME characters."""
    text = text if isinstance(text, str) else str(text)
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}... ({len(text)} characters)"


def show(samples: Samples, texts: "Texts", step: int, split: str, i: int) -> dict[str, Any]:
    """Raises SampleError."""
    record = samples.record(step, split, i)
    index = samples.index(step, split)
    assert index is not None, "record() found it"
    members = np.flatnonzero(index.group == index.group[i])
    try:
        out = _head(record)
        out["turns"], left = [], MAX_ALL
        advantages = samples.advantages(step, split, i)
        for number, turn in enumerate(_turns(record)[:MAX_TURNS]):
            shown = _turn(record, turn, number, texts, advantages, (0, min(MAX_TOKENS, left)))
            left -= len(shown["tokens"]["ids"])
            out["turns"].append(shown)
        out["turns_left_out"] = max(len(_turns(record)) - MAX_TURNS, 0)
        finite = advantages[np.isfinite(advantages)] if advantages is not None else np.zeros(0)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise SampleError(
            f"step {step} {split} episode {i} is not of a form that is known ({type(error).__name__}:"
            f" {str(error)[:160]}); see its raw bytes"
        ) from None
    return {
        "step": step, "split": split, "i": i, "num": index.num, "group": int(index.group[i]), **out,
        "members": [{"i": int(m), "reward": number_or_none(index.reward[m])} for m in members[:256]],
        "num_members": len(members),
        "has_advantages": advantages is not None,
        "max_advantage": float(np.abs(finite).max()) if len(finite) else 0.0,
        "consumed_by": step - 1 if split == "train" else None,
        "token_fault": texts.fault,
    }  # fmt: skip


def more(
    samples: Samples, texts: "Texts", who: tuple[int, str, int], turn: int, start: int
) -> dict:
    """The next tokens of one turn, from its token `start`. Raises SampleError."""
    record = samples.record(*who)
    try:
        place = _turns(record)[turn]
        advantages = samples.advantages(*who)
        span = (max(start, 0), max(start, 0) + MAX_TOKENS)
        return _turn(record, place, turn, texts, advantages, span)["tokens"]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise SampleError(f"no such tokens ({type(error).__name__}: {str(error)[:160]})") from None


def tools(samples: Samples, texts: "Texts", step: int, split: str) -> dict[str, Any]:
    """Tool calls of a step by name, with errors, and what was answered. Raises SampleError."""
    index = samples.index(step, split)
    if index is None:
        raise SampleError(f"step {step} has no complete traces of {split}")
    kinds: dict[str, dict[str, Any]] = {}
    num_turns, num_bad = 0, 0
    finishes: Counter[str] = Counter()
    for i in range(min(index.num, MAX_SCANNED)):
        try:
            turns = samples.record(step, split, i).get("turns") or []
            for number, turn in enumerate(turns[:MAX_TURNS]):
                num_turns += 1
                finishes[short(turn.get("finish"))] += 1
                answer = turns[number + 1].get("prompt_text", "") if number + 1 < len(turns) else ""
                for call in texts.calls(str(turn.get("text", ""))[:MAX_TEXT]):
                    name = short(call.get("name", "unreadable"))
                    kind = kinds.setdefault(
                        name, {"num": 0, "errors": 0, "rewards": [], "examples": []}
                    )
                    kind["num"] += 1
                    kind["errors"] += "error" in call
                    kind["rewards"].append(number_or_none(index.reward[i]))
                    if len(kind["examples"]) < 5:
                        said = call.get("error") or json.dumps(
                            call["arguments"], ensure_ascii=False
                        )
                        kind["examples"].append(
                            {
                                "i": i,
                                "turn": number,
                                "said": cut(said, 400),
                                "answer": cut(answer, 400),
                            }
                        )
        except (SampleError, TypeError, AttributeError, ValueError):
            num_bad += 1  # told beside the table
    for kind in kinds.values():
        known = [value for value in kind.pop("rewards") if value is not None]
        kind["reward"] = sum(known) / len(known) if known else None
    return {
        "step": step, "split": split, "episodes": index.num, "scanned": min(index.num, MAX_SCANNED),
        "unreadable": num_bad, "turns": num_turns, "finishes": dict(finishes),
        "kinds": [{"name": name, **kinds[name]} for name in sorted(kinds, key=lambda n: -kinds[n]["num"])][:200],
        "fault": texts.fault,
    }  # fmt: skip


def _head(record: Mapping[str, Any]) -> dict[str, Any]:
    reward = record.get("reward") or {}
    failure = record.get("failure")
    return {
        "uid": short(record["uid"]), "attempt": record.get("attempt"), "group_uid": short(record.get("group")),
        "task": short(record.get("task_id")), "tag": short(record.get("tag")), "sample": record.get("sample"),
        "outcome": short(record.get("outcome")), "truncated_by": record.get("truncated_by"),
        "start_version": record.get("start_version"), "num_tokens": len(record["tokens"]),
        "num_trained": sum(map(bool, record["loss_mask"])),
        "contexts": len(record.get("sample_starts") or (0,)),
        "reward": {
            "value": number_or_none(reward.get("value")), "status": short(reward.get("status")),
            "parts": {short(k): number_or_none(v) for k, v in list((reward.get("parts") or {}).items())[:50]},
            "scorer": short(reward.get("scorer_version")), "detail": cut(reward.get("detail") or "", 2000),
        },
        "failure": {k: cut(v, 2000)["text"] for k, v in list(failure.items())[:10]} if failure else None,
    }  # fmt: skip


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """With where its sampled tokens begin and end; a trajectory without turns is one."""
    turns, at = [], 0
    for turn in record.get("turns") or [{"num_prompt": 0, "num_tokens": len(record["tokens"])}]:
        start = at + int(turn["num_prompt"])
        at = start + int(turn["num_tokens"])
        turns.append({**turn, "start": start, "end": at})
    return turns


def _turn(
    record: Mapping[str, Any],
    turn: Mapping[str, Any],
    number: int,
    texts: "Texts",
    advantages: np.ndarray | None,
    span: tuple[int, int],
) -> dict[str, Any]:
    """span: which of its sampled tokens."""
    start, end = turn["start"], turn["end"]
    first, last = min(start + span[0], end), min(start + span[1], end)
    own = slice(first, last)
    ids = record["tokens"][own]
    versions = [None] * (last - first)
    for a, b, version in record.get("versions") or ():
        for at in range(max(a, first), min(b, last)):
            versions[at - first] = version
    rewards, roles = record.get("turn_rewards") or (), record.get("roles") or ()
    said = turn.get("text", "")
    return {
        "number": number, "num_prompt": turn["num_prompt"], "num_tokens": turn["num_tokens"],
        "seen": cut(turn.get("prompt_text", "")), "said": cut(said),
        "calls": [_call(call) for call in texts.calls(str(said)[:MAX_TEXT])[:50]],
        "finish": short(turn.get("finish")), "server": short(turn.get("server")), "pool": short(turn.get("pool")),
        "cached_prompt": turn.get("cached_prompt"),
        "times_s": {short(k): number_or_none(v) for k, v in list((turn.get("times_s") or {}).items())[:20]},
        "reward": number_or_none(rewards[number]) if number < len(rewards) else None,
        "role": short(roles[number]) if number < len(roles) else "",
        "tokens": {
            "start": first - start, "left_out": end - last, "ids": ids, "pieces": [p[:200] for p in texts.pieces(ids)],
            "logprobs": [number_or_none(x, 4) for x in record["logprobs"][own]],
            "mask": [bool(x) for x in record["loss_mask"][own]],
            "mixed": [bool(x) for x in (record.get("context_mixed") or ())[own]],
            "versions": versions,
            "advantages": None if advantages is None else [number_or_none(x, 4) for x in advantages[own].tolist()],
        },
    }  # fmt: skip


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in call:
        return {"error": cut(call["error"], 2000)}
    return {
        "name": short(call["name"]),
        "arguments": {short(k): cut(v, 2000) for k, v in call["arguments"].items()},
    }


def number_or_none(value: Any, digits: int | None = None) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        value = float(value)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)
