"""A row -> a Group of trajectories, as if a policy had said what its assistant says.

Invariants: the tokens are those that rollout's renderer makes of the same conversation, turn by turn; trained are
exactly the assistant's content and the end token behind it, never a header or another's message; log-probs and versions
say that nothing was sampled.
Must not: read a file, or decide what is done with a row that is too long (corpus.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_jax.data.rows import Row, RowError
from rl_jax.tokens import Renderer
from rl_jax.tokens.renderer import Tools
from rl_jax.types import Group, Message, Outcome, Reward, Trajectory

PREFERRED = (1.0, 0.0)  # rewards of a pair's chosen and rejected


@dataclass(frozen=True)
class ExampleRules:
    """What becomes of a row."""

    kind: str  # chat: one trajectory | pairs: chosen and rejected | ends: a pair, only the last tokens trained
    train_on: str  # all | last: which assistant turns behind the prompt
    max_tokens: int  # a longer conversation is cut behind so many
    tag: str = "data"

    @property
    def form(self) -> str:
        """The form of its rows (rows.py)."""
        return "chat" if self.kind == "chat" else "pairs"


@dataclass(frozen=True)
class Example:
    group: Group
    num_tokens: int  # of the longest member, before it was cut
    is_cut: bool

    @property
    def trains(self) -> bool:
        """Whether something is left of every member to train, and of a pair's members that they differ."""
        members = self.group.trajectories
        if not all(member.loss_mask.any() for member in members):
            return False
        return len(members) == 1 or not np.array_equal(members[0].tokens, members[1].tokens)


def make_example(row: Row, index: int, renderer: Renderer, rules: ExampleRules) -> Example:
    """index: of the row among all of its corpus; it names the group. Raises RowError."""
    rendered = [
        render(conversation, row.num_prompt, renderer, rules.train_on, row.tools)
        for conversation in row.conversations
    ]
    uid = f"{rules.tag}/{index}"
    members = []
    for sample, (tokens, mask, turns) in enumerate(rendered):
        tokens, mask, turns = (a[: rules.max_tokens] for a in (tokens, mask, turns))
        if rules.kind == "ends" and mask.any():
            mask = np.arange(len(mask)) == len(mask) - 1
        reward = PREFERRED[sample] if len(rendered) == 2 else None
        members.append(_trajectory(uid, index, sample, (tokens, mask, turns), reward))
    group = Group(uid, uid, rules.tag, 0, index, tuple(members))
    longest = max(len(tokens) for tokens, _, _ in rendered)
    return Example(group, longest, longest > rules.max_tokens)


def render(
    messages: Sequence[Message],
    num_prompt: int,
    renderer: Renderer,
    train_on: str = "all",
    tools: Tools = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens i32[T], loss_mask bool[T], turn_ids i16[T] as a Trajectory's) of a conversation that ends with the
    assistant. The first num_prompt messages are not trained, whoever says them."""
    if messages[0].role == "assistant":
        raise RowError("begins with the assistant; give it something to answer first")
    said = [i for i, message in enumerate(messages) if message.role == "assistant"]
    trained = [i for i in said if i >= num_prompt]
    if train_on == "last":
        trained = trained[-1:]
    parts, mask, turn_ids, is_closed = [], [], [], False
    for turn, i in enumerate(said):
        between = messages[said[turn - 1] + 1 if turn else 0 : i]
        if turn:
            calls = messages[said[turn - 1]].tool_calls
            head = renderer.next(between, closed=is_closed, calls=calls)
        else:
            head = renderer.first(between, tools)
        answer = renderer.said(messages[i])
        is_closed = renderer.is_closed(answer)
        parts += [head, answer]
        mask += [np.zeros(len(head), bool), np.full(len(answer), i in trained)]
        turn_ids += [np.full(len(head), turn if turn else -1), np.full(len(answer), turn)]
    arrays = np.concatenate(parts), np.concatenate(mask), np.concatenate(turn_ids)
    return arrays[0].astype(np.int32), arrays[1], arrays[2].astype(np.int16)


def _trajectory(
    uid: str, index: int, sample: int, arrays: tuple[np.ndarray, ...], reward: float | None
) -> Trajectory:
    tokens, mask, turn_ids = arrays
    num, num_turns = len(tokens), int(turn_ids.max()) + 1
    for array in arrays:
        array.setflags(write=False)
    status = "error" if reward is None else "scored"
    return Trajectory(
        uid=f"{uid}/{sample}",
        attempt=0,
        group=uid,
        task_id=uid,
        epoch=0,
        index=index,
        sample=sample,
        tag=uid.partition("/")[0],
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.zeros(num, np.float32),
        versions=np.full(num, -1, np.int32),
        context_mixed=np.zeros(num, bool),
        turn_ids=turn_ids,
        turn_rewards=np.full(num_turns, np.nan, np.float32),
        state_keys=("",) * num_turns,
        turns=(),
        reward=Reward(reward, {}, (), status, "data", "rows are not scored" if reward is None else ""),
        outcome=Outcome.OK,
        truncated_by=None,
        failure=None,
        start_version=0,
    )  # fmt: skip
