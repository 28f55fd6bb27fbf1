"""Text of single tokens, and tool calls in a turn, by the tokenizer and parser that the run's config names.

Invariants: the pieces of a run of tokens, put together, are the text that the tokenizer gives them all (as far as its
decoding is local); bytes of a character that several tokens share come with its last one, the others are "". Where the
tokenizer cannot be had (its directory is not on this machine), tokens are shown by number and the reason is told once.
Must not: raise for what a policy sampled, or for a config that cannot be read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_jax.tokens.load import load_tokenizer, make_renderer
from rl_jax.tokens.tool_calls import parse_text
from rl_jax.viewer.run import at

WINDOW = 24  # tokens decoded together; a character has at most 4 bytes, a byte token each
LOOK_BACK = 4  # of them before a new one
MAX_PIECES = 200_000  # tokens of one episode


class Texts:
    """The tokenizer of a run, once it is asked for."""

    def __init__(self, config: Mapping[str, Any], resolve: Callable[[str, Mapping[str, Any]], Any]):
        """resolve: as rl_jax.names.resolve."""
        self.fault = ""  # why there is no tokenizer
        self._tokenizer: Any = None
        self._parser: Any = None
        self._texts: dict[int, str] = {}  # of tokens alone; at most a vocabulary
        name = at(config, "model.tokenizer") or at(config, "model.source") or ""
        try:
            if not isinstance(name, str) or not name:
                raise ValueError("config.json names none")
            self._tokenizer = load_tokenizer(name, resolve)
            parser = str(at(config, "rollout.tool_parser") or "auto")
            self._parser = make_renderer(self._tokenizer, parser, resolve).parser
        except Exception as error:  # boundary: a tokenizer of a plugin or of a damaged directory
            lack = (
                "tool calls are not told apart" if self._tokenizer else "tokens are shown by number"
            )
            self.fault = f"tokenizer {name!r}: {type(error).__name__}: {str(error)[:200]}; {lack}"

    @property
    def has_tokens(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """One text a token; "" for a part of a character. Numbers in brackets without a tokenizer."""
        if self._tokenizer is None:
            return [f"[{token}]" for token in tokens]
        tokens = tokens[:MAX_PIECES]
        try:
            alone = [self._alone(token) for token in tokens]
            if "".join(alone) == self._tokenizer.decode(
                tokens
            ):  # no character is of several tokens
                return alone
            return pieces(self._tokenizer.decode, tokens)
        except Exception as error:  # boundary: ids that no tokenizer has, a tokenizer of a plugin
            self.fault = self.fault or f"{type(error).__name__}: {str(error)[:200]}"
            return [f"[{token}]" for token in tokens]

    def _alone(self, token: int) -> str:
        if (text := self._texts.get(token)) is None:
            text = self._texts[token] = self._tokenizer.decode([token])
        return text

    def calls(self, text: str) -> list[dict[str, Any]]:
        """Calls that the run's parser reads in a turn: name and arguments; or one with an error."""
        if self._parser is None or not any(mark in text for mark in self._parser.markers):
            return []
        try:
            action = parse_text(self._parser, text)
        except Exception as error:  # boundary: a parser of a plugin
            return [{"error": f"{type(error).__name__}: {str(error)[:200]}"}]
        found = [
            {"name": call.name, "arguments": dict(call.arguments)} for call in action.tool_calls
        ]
        return found + ([{"error": action.parse_error}] if action.parse_error else [])


def pieces(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text of those before it."""
    out: list[str] = []
    start, shown = 0, ""
    for i in range(len(tokens)):
        text = decode(tokens[start : i + 1])
        is_part = text.endswith("\ufffd") and i + 1 < len(tokens) and i - start < 2 * WINDOW
        if is_part and _is_completed(decode, tokens, start, i, len(shown)):
            out.append("")
            continue
        out.append(text[len(shown) :])
        shown = text
        if i + 1 - start >= WINDOW:
            start = i + 1 - LOOK_BACK
            shown = decode(tokens[start : i + 1])
    return out


def _is_completed(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], start: int, i: int, known: int
) -> bool:
    """Whether one of the next three tokens makes a character of what ends in U+FFFD now."""
    now = decode(tokens[start : i + 1])[known:]
    for more in range(1, 4):
        if i + more >= len(tokens):
            return False
        later = decode(tokens[start : i + 1 + more])[known:]
        if not later.startswith(now):
            return True
    return False
