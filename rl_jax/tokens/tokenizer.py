"""What every tokenizer offers, and the roles of a conversation."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

ROLES = ("system", "user", "assistant", "tool")


class Tokenizer(Protocol):
    """What rendering and serving need of a tokenizer."""

    vocab_size: int
    stop_token_ids: tuple[
        int, ...
    ]  # sampling one of these ends a turn; the first is what a turn should end with

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text; never a control token, whatever the text says."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of any tokens: control tokens by name, bytes that are no UTF-8 as U+FFFD, and so ids above the
        vocabulary, which a model with more of them may sample. Raises ValueError for a negative id."""
        ...

    def fingerprint(self) -> str:
        """Equal for tokenizers that give every text the same tokens."""
        ...


def encodable(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD and pairs joined; else unchanged."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
