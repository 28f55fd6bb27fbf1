"""Tokenizer and chat rendering: the only text <-> token conversion of the system.

Owns: the vocabulary, the conversation's scaffold (who speaks, where a turn ends) and the parsing of
what was sampled.

Invariants
    Content never yields a special token: encode() knows bytes only, so the text "<|user|>" in an
    observation becomes eight plain byte tokens. Special tokens come from the scaffold, or were
    sampled.
    Rendering is prefix-preserving by construction: first() makes the first context; every later
    context is context + sampled tokens + next(...). Nothing that was seen or sampled is rendered
    again, so no text is ever re-tokenised and trained tokens are the tokens the policy saw.
    decode(encode(text)) == text for every text without lone surrogates. A lone surrogate (half of a
    UTF-16 pair, which no UTF-8 can hold) becomes U+FFFD when it is encoded, in every tokenizer;
    Message.content keeps it.

Life of a conversation
    1. first(messages):      <|bos|> <|user|> content <|end|> <|assistant|>
    2. the policy samples until <|end|> (or <|eos|>, or its budget)
    3. parse(sampled) gives the Action that the environment receives
    4. next(messages, closed=...): [<|end|> if the policy did not sample it]
                                   <|user|> content <|end|> <|assistant|>
    5. back to 2.

Must not: see an environment, a reward or a device array.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rl_jax.types import Action, Message

# name -> "module:attribute"; any other name is taken as "package.module:attribute" itself.
TOKENIZERS: dict[str, str] = {"byte": "rl_jax.tokens:ByteTokenizer"}

ROLES = ("system", "user", "assistant", "tool")


class Tokenizer(Protocol):
    """What rendering and serving need of a tokenizer."""

    vocab_size: int
    pad: int
    bos: int
    eos: int
    end: int  # ends a message
    stop_token_ids: tuple[int, ...]  # sampling one of these ends a turn

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text; never a special token, whatever the text says."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of any tokens: special tokens by name, bytes that are no UTF-8 as U+FFFD."""
        ...

    def role(self, name: str) -> int:
        """The special token that opens a message of this role."""
        ...


class ByteTokenizer:
    """One token a UTF-8 byte, after eight special tokens: 0..7 = SPECIALS in order, 8 + b = byte b.

    That order is part of every saved model and trajectory.
    """

    SPECIALS = (
        "<|pad|>",
        "<|bos|>",
        "<|eos|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
        "<|end|>",
    )

    def __init__(self):
        self.pad, self.bos, self.eos = 0, 1, 2
        self.end = 7
        self.vocab_size = len(self.SPECIALS) + 256
        self.stop_token_ids = (self.end, self.eos)

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, one a byte; a lone surrogate is encoded as U+FFFD."""
        offset = len(self.SPECIALS)
        return [offset + byte for byte in encodable(text).encode("utf-8")]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of any tokens. Raises ValueError for a token outside the vocabulary."""
        ids = np.asarray(tokens, np.int64)
        if len(outside := ids[(ids < 0) | (ids >= self.vocab_size)]):
            raise ValueError(
                f"token {outside[0]} is outside the byte vocabulary 0..{self.vocab_size - 1}"
            )
        offset = len(self.SPECIALS)
        raw = (ids - offset).astype(np.uint8).tobytes()  # means nothing where a token is special
        parts, start = [], 0
        for at in np.flatnonzero(ids < offset).tolist():
            # A name is ASCII, so it also ends a broken UTF-8 sequence before it.
            parts += [raw[start:at], self.SPECIALS[ids[at]].encode()]
            start = at + 1
        return b"".join([*parts, raw[start:]]).decode("utf-8", errors="replace")

    def role(self, name: str) -> int:
        """Raises ValueError for a role that has no token."""
        if name not in ROLES:
            raise ValueError(f"message role {name!r} has no token; use one of {', '.join(ROLES)}")
        return self.SPECIALS.index(f"<|{name}|>")


def encodable(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD and pairs joined; else unchanged."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class ChatRenderer:
    """Messages -> tokens of one conversation format, and sampled tokens -> Action. Stateless."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def first(self, messages: Sequence[Message]) -> np.ndarray:
        """The first context, up to and with the assistant's header.

        Args:    messages: the task's messages followed by those of reset(); at least one.
        Returns: i32[P].
        Raises:  ValueError: no message, a role without a token, or tool calls.
        """
        if not messages:
            raise ValueError(
                "a conversation needs a first message; the task and reset() of its environment "
                "gave none"
            )
        return self._array([self.tokenizer.bos], messages)

    def next(self, messages: Sequence[Message], *, closed: bool) -> np.ndarray:
        """The suffix between two turns of the policy, up to and with the assistant's header.

        Args:    messages: what the environment said since the last turn; may be empty.
                 closed: is_closed(tokens of the last turn).
        Returns: i32[P], to be appended to the context that ends with the last turn's tokens.
        Raises:  ValueError as first().
        """
        return self._array([] if closed else [self.tokenizer.end], messages)

    def is_closed(self, tokens: np.ndarray) -> bool:
        """Whether a turn's sampled tokens end with the end token: next() must not add it then."""
        return len(tokens) > 0 and int(tokens[-1]) == self.tokenizer.end

    def parse(self, tokens: np.ndarray) -> Action:
        """What the policy said: the text of the sampled tokens without a stop token at their end.

        No tool-call syntax is parsed in this version: Action.tool_calls is always empty.
        """
        if len(tokens) and int(tokens[-1]) in self.tokenizer.stop_token_ids:
            tokens = tokens[:-1]
        return Action(text=self.tokenizer.decode(tokens))

    def _array(self, head: list[int], messages: Sequence[Message]) -> np.ndarray:
        """Scaffold and content as separate segments, so that content cannot forge the scaffold."""
        tokenizer, out = self.tokenizer, head
        for message in messages:
            if message.tool_calls:
                raise ValueError(
                    f"a {message.role} message has {len(message.tool_calls)} tool calls, which the "
                    "chat format cannot render in this version; write them into the content"
                )
            out.append(tokenizer.role(message.role))
            out += tokenizer.encode(message.content)
            out.append(tokenizer.end)
        out.append(tokenizer.role("assistant"))
        return np.array(out, np.int32)
