"""One token a UTF-8 byte: no file, no training, every text."""

from collections.abc import Sequence

import numpy as np

from rl_jax.tokens.tokenizer import ROLES, encodable


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
        """See Tokenizer."""
        ids = np.asarray(tokens, np.int64)
        if len(ids) and ids.min() < 0:
            raise ValueError(f"token {ids.min()} is outside the byte vocabulary")
        offset = len(self.SPECIALS)
        raw = (ids - offset).astype(np.uint8).tobytes()  # means nothing where a token is no byte
        parts, start = [], 0
        for at in np.flatnonzero((ids < offset) | (ids >= self.vocab_size)).tolist():
            # A name is ASCII, so it also ends a broken UTF-8 sequence before it; so does U+FFFD.
            named = self.SPECIALS[ids[at]] if ids[at] < offset else "\ufffd"
            parts += [raw[start:at], named.encode()]
            start = at + 1
        return b"".join([*parts, raw[start:]]).decode("utf-8", errors="replace")

    def role(self, name: str) -> int:
        """Raises ValueError for a role that has no token."""
        if name not in ROLES:
            raise ValueError(f"message role {name!r} has no token; use one of {', '.join(ROLES)}")
        return self.SPECIALS.index(f"<|{name}|>")

    def fingerprint(self) -> str:
        return f"byte {' '.join(self.SPECIALS)}"
