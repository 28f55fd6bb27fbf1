"""A run directory made of thin air, of any size, by the writers of a real one: for readers of runs.

Owns: what a run leaves that the viewer reads: config, status, metrics, events, ledger, rollouts with advantages.
Invariants: every file comes from its real writer (MetricsWriter, Ledger, write_traces); the same arguments give the
same episodes; figures and episodes tell one story (rewards rise, entropy falls, one step has an alarm).
Must not: train, or import jax.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from rl_jax.ledger import EpisodeFacts, EpisodeRef, Ledger
from rl_jax.metrics import Metric, MetricsWriter
from rl_jax.rollout.traces import write_traces
from rl_jax.settings import Settings
from rl_jax.tokens import ByteTokenizer
from rl_jax.types import (
    Failure,
    FinishReason,
    Group,
    Outcome,
    Reward,
    Trajectory,
    Turn,
    VersionSpan,
)

RUN_ID = "generated"
TOKENIZER = ByteTokenizer()
HOSTILE = (  # what a model, an environment or a file may say
    '<script>document.title="owned"</script><img src=x onerror="document.title=1">',
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J bell\x07 back\x08space \r over",
    "lone \ud83d surrogate \udc00 and \u202eright to left\u202c \u200bzero\u2066 width",
    "</script></textarea></pre>--> &lt;b&gt; {{x}} ${y} `z` \u2028\u2029",
)
NUM_BODIES = 24  # different conversations; episodes differ in reward, version and log-probs


def write_run(
    path: Path | str,
    steps: int,
    groups: int,
    members: int,
    *,
    hostile: bool = False,
    state: str = "done",
) -> Path:
    """steps x groups x members trained episodes, and an evaluation of one group every tenth of the steps.

    hostile: texts of HOSTILE stand in turns, observations, tags, task ids, reasons and details. state: of STATUS.json.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    settings = Settings()
    settings = replace(settings, steps=steps, model=replace(settings.model, tokenizer="byte"))
    _write(path / "config.json", {"run_id": RUN_ID, **asdict(settings)})
    _write(path / "ENV.json", {"host": "somewhere", "versions": {"jax": "0.0"}, "git": None})
    writer, ledger = MetricsWriter(path), Ledger(path / "ledger.jsonl", RUN_ID)
    bodies = [_body(np.random.default_rng([7, i]), i, hostile) for i in range(NUM_BODIES)]
    clock = time.time() - 2.0 * steps
    with open(path / "events.jsonl", "w", encoding="utf-8") as events:
        for step in range(1, steps + 1):
            share = step / steps
            made = [
                _group(step, g, members, share, bodies, ("train", hostile)) for g in range(groups)
            ]
            trajectories = [t for group in made for t in group.trajectories]
            advantages = [a for group in made for a in _advantages(group)]
            write_traces(
                path / "rollouts" / f"step_{step}" / "train", trajectories, TOKENIZER.decode,
                advantages=advantages,
            )  # fmt: skip
            _account(ledger, step, trajectories, hostile)
            writer.write(step, _row(step, share, made))
            if step % max(steps // 10, 1) == 0:
                evaluated = _group(step, groups, members, share, bodies, ("eval", hostile))
                write_traces(
                    path / "rollouts" / f"step_{step}" / "eval", evaluated.trajectories,
                    TOKENIZER.decode, append=True,
                )  # fmt: skip
                writer.write(
                    step, {"eval/success.maze": 0.1 + 0.8 * share, "eval/episodes.maze": members}
                )
                _event(events, clock + 2 * step, "saved", step=step)
            if step == max(steps // 2, 1):
                text = HOSTILE[0] if hostile else "is/ess=0.21 is below guards.ess_below=0.5"
                _event(events, clock + 2 * step, "alarm", step=step, name="ess", text=text)
    writer.close()
    ledger.close()
    status = {
        "state": state,
        "run_id": RUN_ID,
        "attempt": 0,
        "pid": 1,
        "time": time.time(),
        "step": steps,
    }
    _write(path / "STATUS.json", status)
    if state == "done":
        _write(
            path / "summary.json",
            {"steps": steps, "wall_s": 2.0 * steps, "tasks": {"maze": {"last": 0.9}}},
        )
    return path


def _body(rng: np.random.Generator, number: int, hostile: bool) -> list[tuple[str, str]]:
    """(observation, what the policy says) of each turn."""
    cells = ["S...\n.#..\n..#.\n#..G", "S..\n.#.\n..G", "S.#.\n...G\n.#.."]
    moves = ["right", "down", "left", "up"]
    turns = []
    for turn in range(1 + number % 4):
        seen = f"<|user|>You are at ({turn}, {number % 3}).\n{cells[number % 3]}\nWhere to?<|end|><|assistant|>"
        move = moves[int(rng.integers(4))]
        said = f"The way {move} looks open.\n{move}<|end|>"
        if number % 6 == 4:
            call = {"name": ("look", "walk")[turn % 2], "arguments": {"to": move}}
            said = f"I look first. <tool_call>{json.dumps(call)}</tool_call><|end|>"
            seen = (
                seen
                if turn == 0
                else f"<|tool|>a wall, then open ground to the {move}<|end|><|assistant|>"
            )
        if number % 12 == 10 and turn == 1:
            said = '<tool_call>{"name": "look", "argum</tool_call><|end|>'
        if hostile and turn == 0:
            said = f"{HOSTILE[number % len(HOSTILE)]} {said}"
            seen = f"{HOSTILE[(number + 1) % len(HOSTILE)]} {seen}"
        turns.append((seen, said))
    return turns


def _encode(text: str) -> np.ndarray:
    """With the byte tokenizer's control tokens where their names stand."""
    ids: list[int] = []
    for special in ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"):
        text = text.replace(special, f"\x00{ByteTokenizer.SPECIALS.index(special)}\x00")
    for i, piece in enumerate(text.split("\x00")):
        ids += [int(piece)] if i % 2 else TOKENIZER.encode(piece)
    return np.array(ids, np.int32)


def _group(
    step: int, number: int, members: int, share: float, bodies: Sequence, kind: tuple[str, bool]
) -> Group:
    """kind: split, and whether texts are hostile."""
    split, hostile = kind
    rng = np.random.default_rng([step, number, split == "eval"])
    skill = 0.15 + 0.7 * share * (1 - 0.4 * (number % 3) / 2)
    tag = ("maze", "sums")[number % 2]
    if hostile and number == 0:
        tag = HOSTILE[0]
    index = step * 1000 + number
    uid = f"{RUN_ID}/{split}/{index}"
    out = []
    for sample in range(members):
        body = bodies[int(rng.integers(len(bodies)))]
        draw = rng.random()
        value = (
            1.0
            if draw < skill
            else round(float(rng.beta(1.5, 6)), 2)
            if draw < skill + 0.2
            else 0.0
        )
        out.append(_trajectory(step, body, value, (uid, index, sample, tag), rng, hostile))
    return Group(uid, out[0].task_id, tag, 0, index, tuple(out))


def _trajectory(step, body, value, who, rng, hostile) -> Trajectory:
    group, index, sample, tag = who
    turns, tokens, mask, logprobs, versions, turn_ids, mixed = [], [], [], [], [], [], []
    newest = step - 1
    for number, (seen, said) in enumerate(body):
        prompt, own = _encode(seen), _encode(said)
        lag = min(int(rng.integers(3)), newest)
        cut = len(own) // 2 if lag else len(own)
        logprob = -np.abs(rng.gamma(0.4, 0.9, len(own))).astype(np.float32)
        spans = [VersionSpan(0, cut, newest - lag)]
        spans += [VersionSpan(cut, len(own), newest)] if cut < len(own) else []
        is_mixed = np.arange(len(own)) >= cut
        turns.append(
            Turn(
                prompt,
                own,
                logprob,
                None,
                tuple(spans),
                is_mixed,
                FinishReason.EOS,
                len(tokens),
                f"decode.{sample % 2}",
                "decode",
                {"queue": 0.01, "prefill": 0.02, "decode": 0.3},
            )  # fmt: skip
        )
        tokens += [*prompt.tolist(), *own.tolist()]
        mask += [False] * len(prompt) + [sample > 0 or number != 1] * len(own)  # not all is trained
        logprobs += [0.0] * len(prompt) + logprob.tolist()
        versions += [-1] * len(prompt) + turns[-1].versions.tolist()
        mixed += [False] * len(prompt) + is_mixed.tolist()
        turn_ids += [number if number else -1] * len(prompt) + [number] * len(own)
    outcome = Outcome.TRUNCATED if index % 17 == 3 and sample == 0 else Outcome.OK
    detail = HOSTILE[1] if hostile else ""
    return Trajectory(
        f"{group}/{sample}", 0, group, f"{HOSTILE[2] if hostile else 'task'}-{index}", 0, index, sample, tag,
        np.array(tokens, np.int32), np.array(mask), np.array(logprobs, np.float32),
        np.array(versions, np.int32), np.array(mixed), np.array(turn_ids, np.int16),
        np.array([np.nan] * (len(body) - 1) + [value], np.float32), tuple("s" for _ in body), tuple(turns),
        Reward(value, {"goal": value, "form": 0.1}, (value,), "scored", "env", detail), outcome,
        "turn_limit" if outcome is Outcome.TRUNCATED else None, None, newest,
    )  # fmt: skip


def _advantages(group: Group) -> list[np.ndarray]:
    values = np.array([t.reward.value for t in group.trajectories], np.float32)
    scaled = (values - values.mean()) / (values.std() + 1e-6)
    return [
        np.where(t.loss_mask, a, np.nan).astype(np.float32)
        for t, a in zip(group.trajectories, scaled)
    ]


def _account(ledger: Ledger, step: int, trajectories: Sequence[Trajectory], hostile: bool) -> None:
    """Each trained episode's records, and now and then one that failed, was dropped or was cancelled."""
    for t in trajectories:
        ref = EpisodeRef(t.uid, 0, t.group, 0, t.index, t.sample, t.tag)
        facts = EpisodeFacts(t.start_version, (t.start_version,), t.num_sampled, "0" * 64)
        done = "TRUNCATED" if t.outcome is Outcome.TRUNCATED else "COMPLETED"
        for state in ("ISSUED", "RUNNING", done, "TRAINED"):
            ledger.write(ref, state, step=step if state == "TRAINED" else None, facts=facts)
    ends = [
        ("ERRORED", "env_timeout"),
        ("ERRORED", "reward_schema"),
        ("DROPPED", "stale"),
        ("CANCELLED", "redundant"),
    ]
    state, reason = ends[step % len(ends)]
    failure = Failure("env", "timeout", "infra", "no answer")
    reason = HOSTILE[step % len(HOSTILE)] if hostile and state == "ERRORED" else reason
    ref = EpisodeRef(
        f"{RUN_ID}/lost/{step}", 0, f"{RUN_ID}/lost/{step}", 0, step, 0, trajectories[0].tag
    )
    ledger.write(ref, "ISSUED")
    ledger.write(ref, "RUNNING")
    if state == "DROPPED":
        ledger.write(ref, "COMPLETED")
    ledger.write(ref, state, reason=reason or failure.kind)


def _row(step: int, share: float, groups: Sequence[Group]) -> dict:
    values = [t.reward.value or 0.0 for g in groups for t in g.trajectories]
    wave = math.sin(step / 9) * 0.03
    entropy = 1.2 * (1 - 0.6 * share) + wave
    row = {
        "reward/mean": Metric.of(values), "reward/success": Metric.of([v == 1.0 for v in values]),
        "reward/zero_std_groups": 0.1 + 0.2 * share, "reward/solved_all_groups": 0.3 * share,
        "policy/entropy": entropy, "policy/loss": wave, "policy/clip_frac": 0.02 + abs(wave) / 3,
        "optim/grad_norm": 0.8 + abs(wave) * 4, "optim/learning_rate": 1e-3,
        "mismatch/k3": 2e-4 + abs(wave) / 400, "mismatch/abs_mean": 0.004 + abs(wave) / 60,
        "mismatch/abs_mean_lag0_pure": 1e-6, "mismatch/abs_mean_lag1_pure": 0.01,
        "is/ess": 0.9 + wave, "staleness/mean": 0.8 + wave, "staleness/share_lag0": 0.5,
        "staleness/share_lag1": 0.3, "staleness/share_lag2": 0.2,
        "length/response": 40 + 20 * share, "length/turns": 2.4 + wave, "length/truncated": 0.05,
        "batch/tokens": 4000.0, "batch/fill": 0.82 + wave, "time/step_s": 2.0 + wave,
        "time/wait_for_batch_s": 0.9 + wave, "time/train_s": 0.8, "time/sync_s": 0.12,
        "serve/kv_usage": 0.4 + wave, "serve/running": 12.0, "serve/waiting": 1.0,
        "perf/decode_tokens_per_s": 900.0 + 2000 * wave, "goodput/run": 0.4 + wave,
        "goodput/sample": 0.9, "episodes/issued": 100.0 * step, "episodes/errored": 0.5 * step,
    }  # fmt: skip
    for i, tag in enumerate(("maze", "sums")):
        row[f"reward/mean.{tag}"] = 0.2 + 0.5 * share * (1 + i) / 2 + wave
    if 0.5 <= share < 0.52:
        row |= {"is/ess": 0.21, "alarm/ess": 1}
    return row


def _event(file, at_s: float, kind: str, **fields) -> None:
    file.write(json.dumps({"time": round(at_s, 3), "attempt": 0, "kind": kind, **fields}) + "\n")


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
