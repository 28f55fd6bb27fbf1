"""The house's own chat format, for tokenizers with a token for each role (the byte tokenizer, plugins).

    <|bos|> <|user|> content <|end|> <|assistant|>      first(); then turn after turn: said, <|end|>, next()

Scaffold and content are separate segments, so that content cannot forge the scaffold. Tools stand as one line each at
the end of the system message, which is made if there is none; calls are the parser's text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rl_jax.tokens.hermes import Hermes
from rl_jax.tokens.renderer import Tools, sha256_of
from rl_jax.tokens.tokenizer import Tokenizer
from rl_jax.tokens.tool_calls import ToolParser, read_action, signatures
from rl_jax.types import Action, Message, ToolCall


class RoleTokenizer(Tokenizer, Protocol):
    bos: int
    end: int  # ends a message

    def role(self, name: str) -> int:
        """The special token that opens a message of this role. Raises ValueError for one without."""
        ...


class ChatRenderer:
    """Implements Renderer."""

    def __init__(self, tokenizer: RoleTokenizer, parser: ToolParser | None = None):
        """parser: None = Hermes."""
        self.tokenizer: Any = tokenizer
        self.parser: ToolParser = Hermes() if parser is None else parser
        self.stop_token_ids = tokenizer.stop_token_ids
        self.template_sha256 = sha256_of("chat", tokenizer, self.parser.name)

    def with_options(self, options: Mapping[str, bool | str]) -> "ChatRenderer":
        """See Renderer."""
        if options:
            raise ValueError(f"{sorted(options)[0]!r:.80} is no option: this format has none")
        return self

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> np.ndarray:
        """See Renderer."""
        check_first(messages)
        return self._array([self.tokenizer.bos], with_tools(messages, tools, self.parser))

    def next(
        self, messages: Sequence[Message], *, closed: bool, calls: Sequence[ToolCall] = ()
    ) -> np.ndarray:
        """See Renderer. Answers stand in the order of the calls, so `calls` are not needed."""
        return self._array([] if closed else [self.tokenizer.end], messages)

    def rewritten(
        self,
        messages: Sequence[Message],
        turns: Sequence[np.ndarray],
        seen: np.ndarray,
        tools: Tools = (),
    ) -> np.ndarray | None:
        """None: this format never shows another history than was seen."""
        return None

    def said(self, message: Message) -> np.ndarray:
        """See Renderer."""
        return np.array(
            [*self.tokenizer.encode(self._words(message)), self.tokenizer.end], np.int32
        )

    def text(self, tokens: np.ndarray) -> str:
        """See Renderer."""
        return text_of(self.tokenizer, self.stop_token_ids, tokens)

    def is_closed(self, tokens: np.ndarray) -> bool:
        """See Renderer."""
        return len(tokens) > 0 and int(tokens[-1]) == self.tokenizer.end

    def parse(self, tokens: np.ndarray, tools: Tools = ()) -> Action:
        """See Renderer."""
        return read_action(self.parser, self.text(tokens), tools)

    def _words(self, message: Message) -> str:
        if not message.tool_calls:
            return message.content
        return self.parser.write(message.tool_calls, message.content)

    def _array(self, head: list[int], messages: Sequence[Message]) -> np.ndarray:
        tokenizer, out = self.tokenizer, head
        for message in messages:
            out.append(tokenizer.role(message.role))
            out += tokenizer.encode(self._words(message))
            out.append(tokenizer.end)
        out.append(tokenizer.role("assistant"))
        return np.array(out, np.int32)


def check_first(messages: Sequence[Message]) -> None:
    """Raises ValueError where a conversation would begin with nothing."""
    if not messages:
        raise ValueError(
            "a conversation needs a first message; the task and reset() of its environment gave none"
        )


def with_tools(messages: Sequence[Message], tools: Tools, parser: ToolParser) -> Sequence[Message]:
    """The messages with the tools told in the first one, a system message; for formats without a place for tools."""
    if not tools:
        return messages
    told = f"Tools:\n{signatures(tools)}\n{parser.how_to()}"
    if messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{told}"), *messages[1:]]
    return [Message("system", told), *messages]


def text_of(tokenizer: Tokenizer, stop_token_ids: Sequence[int], tokens: np.ndarray) -> str:
    """The text of sampled tokens without a stop token at their end."""
    if len(tokens) and int(tokens[-1]) in stop_token_ids:
        tokens = tokens[:-1]
    return tokenizer.decode(tokens)
