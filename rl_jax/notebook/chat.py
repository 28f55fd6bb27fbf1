"""A conversation with the policy as it is served now, through the run's own router, renderer and sampler.

Owns: `Chat`, the one conversation under way. Invariants: tokens only grow, exactly as the model saw and sampled them
(but where rollout.history=template rewrites them, as episodes do); nothing of it reaches a batch, a metric or the
ledger.
Must not: run beside a step (Run asks for one thing at a time), or know how a turn is served.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_jax.notebook.display import GREY, MONO, block, coloured, escaped, visible
from rl_jax.rollout.episode import sample_seed
from rl_jax.settings import Settings
from rl_jax.tokens import Renderer
from rl_jax.types import Message, Turn, TurnError, TurnRequest

EPOCH = -2  # of seeds: no episode of training (from 0) or evaluation (-1) has them
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Reply:
    """What the policy said."""

    text: str
    turn: Turn
    pieces: tuple[str, ...]  # of its tokens, one by one

    @property
    def version(self) -> int:
        """Of the weights that sampled its end; -1 of nothing."""
        return self.turn.spans[-1].version if self.turn.spans else -1

    def __repr__(self) -> str:
        return visible(self.text)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        told = f"version {self.version}, {len(self.turn.tokens)} tokens, {self.turn.finish.value}"
        spans = coloured(self.pieces, self.turn.logprobs.tolist())
        return f'<div style="{MONO}">{spans}</div><div style="{GREY}">{escaped(told)}</div>'


@dataclass
class Chat:
    """Call it with a text. say: one turn of the servers, which blocks (Rollout.say); close: forget a session."""

    renderer: Renderer
    settings: Settings
    say: Callable[[TurnRequest], Turn]
    close: Callable[[str], None]
    num_tokens: int = 0  # sampled by all conversations: nobody's in the run's figures
    messages: list[Message] = field(default_factory=list)
    _turns: list[np.ndarray] = field(default_factory=list, repr=False)
    _context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)
    _number: int = 0

    def __call__(
        self,
        text: str,
        *,
        new: bool = False,
        system: str = "",
        temperature: float = 1.0,
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> Reply:
        """What the policy answers. new: begin another conversation, with `system` as its first message.

        A turn that fails, or is interrupted, leaves the conversation as it was.
        Raises: ValueError where the conversation fills engine.context; TurnError.
        """
        if new or not self.messages:
            self.reset()
        if system and self.messages:
            raise ValueError("system begins a conversation, and one is under way; say new=True")
        heard = [Message("system", system)] * bool(system) + [Message("user", text)]
        context = self._next_context(heard)
        room = self.settings.engine.context - len(context)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(context)} tokens and engine.context is {self.settings.engine.context}:"
                " begin another with new=True"
            )
        turn = self._ask(context, temperature, min(max_new_tokens, room))
        said = self.renderer.text(turn.tokens)
        self.messages += [*heard, Message("assistant", said)]
        self._context = np.concatenate([context, turn.tokens])
        self._turns.append(turn.tokens)
        self.num_tokens += len(turn.tokens)
        decode = self.renderer.tokenizer.decode
        return Reply(
            said, turn, tuple(decode(turn.tokens[i : i + 1]) for i in range(len(turn.tokens)))
        )

    def reset(self) -> None:
        """Forget the conversation."""
        if self._turns:
            self.close(self._session)
        self.messages, self._turns = [], []
        self._context = np.zeros(0, np.int32)
        self._number += 1

    def __repr__(self) -> str:
        if not self.messages:
            return "no conversation yet; call it with a text"
        return "\n".join(f"{m.role}: {visible(m.content)}" for m in self.messages)

    def _repr_html_(self) -> str:
        return block(repr(self))

    @property
    def _session(self) -> str:
        return f"{self._uid}#0"

    @property
    def _uid(self) -> str:
        return f"{self.settings.run_id}/chat-{self._number}"

    def _next_context(self, heard: list[Message]) -> np.ndarray:
        if not self.messages:
            return self.renderer.first(heard)
        closed = self.renderer.is_closed(self._turns[-1])
        context = np.concatenate([self._context, self.renderer.next(heard, closed=closed)])
        if self.settings.rollout.history == "template":
            anew = self.renderer.rewritten([*self.messages, *heard], self._turns, context)
            return context if anew is None else anew
        return context

    def _ask(self, context: np.ndarray, temperature: float, max_new_tokens: int) -> Turn:
        """One turn; a failure that may pass is tried once more, as in an episode."""
        s, number = self.settings, len(self._turns)
        request = TurnRequest(
            uid=self._uid, attempt=0, turn=number, tokens=context, temperature=temperature, top_p=1.0, top_k=0,
            max_new_tokens=max_new_tokens, stop_token_ids=self.renderer.stop_token_ids, stop=(),
            seed=sample_seed(s.seed, EPOCH, self._number, 0, number), tag=s.tasks.sources[0].tag,
            deadline_s=s.serve.turn_deadline_s,
        )  # fmt: skip
        try:
            return self.say(request)
        except TurnError as error:
            if not error.retryable:
                raise
            return self.say(request)


def without_servers(*_: Any, **__: Any) -> Reply:
    """The chat of a run that has no servers. Raises ValueError."""
    raise ValueError(
        "this run trains on rows and serves nothing; export(DIR), then python -m rl_jax.tools.serve DIR answers"
    )
