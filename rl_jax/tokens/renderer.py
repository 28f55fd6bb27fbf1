"""What every renderer of conversations offers, and the hash by which two of them are known to be the same."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rl_jax.tokens.tokenizer import Tokenizer
from rl_jax.tokens.tool_calls import ToolParser
from rl_jax.types import Action, Message, ToolCall

RENDERER_VERSION = 2  # raise it whenever the same conversation gets other tokens

Tools = Sequence[Mapping[str, Any]]  # of types.Task.tools


class Renderer(Protocol):
    """Messages -> tokens of one conversation format, and sampled tokens -> Action. Stateless, for any thread."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def parser(self) -> ToolParser: ...

    template_sha256: (
        str  # equal only where every conversation gets the same tokens, and they are read alike
    )
    stop_token_ids: tuple[
        int, ...
    ]  # sampling one of these ends a turn; the first is the end that said() writes

    def with_options(self, options: Mapping[str, bool | str]) -> "Renderer":
        """The same format with these of its options chosen.

        Raises: ValueError, one line: an option that the format does not read, or a value that it cannot have.
        """
        ...

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> np.ndarray:
        """The first context, up to and with the assistant's header.

        Args:    messages: the task's messages followed by those of reset(); at least one.  tools: what it may call.
        Returns: i32[P].
        Raises:  ValueError: no message, or one that the format cannot say.
        """
        ...

    def next(
        self, messages: Sequence[Message], *, closed: bool, calls: Sequence[ToolCall] = ()
    ) -> np.ndarray:
        """The suffix between two turns of the policy, up to and with the assistant's header.

        Args:    messages: what the environment said since the last turn; may be empty.
                 closed: is_closed(tokens of the last turn).  calls: those of the last turn, which tool messages answer.
        Returns: i32[P], to be appended to the context that ends with the last turn's tokens.
        Raises:  ValueError as first().
        """
        ...

    def rewritten(
        self,
        messages: Sequence[Message],
        turns: Sequence[np.ndarray],
        seen: np.ndarray,
        tools: Tools = (),
    ) -> np.ndarray | None:
        """The context that the format gives a conversation, where it is another than `seen`; None where it is the same.

        Args:    messages: all of it, the policy's turns included, as text(tokens) in assistant messages.
                 turns: the sampled tokens of the last len(turns) assistant messages.
                 seen: i32[n] the context as first() and next() made it, next() of the last messages included.
        Returns: i32[m] or None. What the format keeps of a turn keeps its sampled tokens.
        """
        ...

    def said(self, message: Message) -> np.ndarray:
        """i32[N] the tokens of an assistant's turn as a policy would have sampled it, its end token included."""
        ...

    def text(self, tokens: np.ndarray) -> str:
        """What a turn's sampled tokens say, without the stop token at their end."""
        ...

    def is_closed(self, tokens: np.ndarray) -> bool:
        """Whether a turn's sampled tokens end with the format's end token: next() must not add it then."""
        ...

    def parse(self, tokens: np.ndarray, tools: Tools = ()) -> Action:
        """The turn as text and calls. Without tools nothing is a call: the text is all that was said."""
        ...


def sha256_of(kind: str, tokenizer: Tokenizer, parser: str, **parts: Any) -> str:
    """template_sha256 of a renderer. parts: whatever else decides what it renders, as JSON."""
    told = {
        "kind": kind,
        "renderer": RENDERER_VERSION,
        "tokenizer": tokenizer.fingerprint(),
        "parser": parser,
        **parts,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode("utf-8")).hexdigest()
