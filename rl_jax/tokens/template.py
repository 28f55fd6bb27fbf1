"""A directory's chat template as a Renderer: what is scaffold and what is content is known of every character.

How. A conversation is rendered twice: as it is, and with every content in a private alphabet (marks.py). Where both
renderings say the same, control tokens are taken where their names stand in the second one's own characters, and all
between them is encoded as plain text; so tokens are those that `tokenizers` gives the first rendering, except that the
name of a control token in a content stays text. A content that steers the template by imitating its markers (the two
differ) is rendered as if it were any other text. In messages of the assistant the template finds its markers
("</think>"), and those that are no special tokens mean what they say: they are the policy's own words.

Later turns. next() renders [a user's message, an assistant's, the new messages] and gives what stands behind the
assistant's words: no history is rendered, whatever the template would make of it. rewritten() renders it, and tells
where the template shows another one (Qwen 3 drops the thoughts of earlier turns).

What a template refuses or leaves out is said in another way, the first that it takes: calls as text in the content;
tool messages as the user's; system messages as the user's; neighbours of one role as one message. A template that goes
beyond its limits (template_limits.py) does so in every way, and is not asked again. One that
ignores its tools is told them in the system message, as ChatRenderer does.

Must not: keep anything between two calls.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from rl_jax.tokens.chat import check_first, text_of, with_tools
from rl_jax.tokens.hf import HfTokenizer
from rl_jax.tokens.marks import PRIVATE_CLASS, Marks
from rl_jax.tokens.renderer import Tools, sha256_of
from rl_jax.tokens.template_engine import compile_template, variables_of
from rl_jax.tokens.template_limits import TemplateLimitError
from rl_jax.tokens.template_messages import (
    FIRST_SAID,
    SAID,
    TOOL,
    USER,
    answering,
    as_dict,
    calls_for,
    check_complete,
    joined,
    own_ids,
    owners,
    schema,
    systems_as_users,
    tools_as_users,
)
from rl_jax.tokens.tokenizer import encodable
from rl_jax.tokens.tool_calls import ToolParser, read_action
from rl_jax.types import Action, Message, ToolCall

# What ends a turn in the families' templates and is a token of each, never text.
MARKUP = re.compile(r"<[|｜][^\s<>]*?[|｜]>|</?[a-z]+_of_[a-z]+>")


# What a client may tell a template beside the messages. No free text: it would stand in the scaffold, where names of
# control tokens are control tokens.
OPTIONS: Mapping[str, tuple[bool | str, ...]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning_effort": ("low", "medium", "high"),
}


@dataclass(frozen=True)
class Rendering:
    text: str  # content in the private alphabet of `marks`
    marks: Marks


class TemplateRenderer:
    """Implements Renderer."""

    def __init__(self, tokenizer: HfTokenizer, template: str, parser: ToolParser):
        """Raises ValueError, one line, for a template that cannot be rendered, or that changes content."""
        self.tokenizer, self.parser, self._template = tokenizer, parser, template
        self._options: dict[str, bool | str] = {}
        self._where = f"the chat template of {tokenizer.directory}"
        if re.search(f"[{PRIVATE_CLASS}]", template):
            raise ValueError(
                f"{self._where} has characters of Unicode's private planes; take them out"
            )
        self._render = compile_template(template, self._where)
        # Markers that stand in the template and are no special tokens.
        markers = set(re.findall(r"</?[a-z_]+>", template)) - self._special()
        names = "|".join(re.escape(m) for m in sorted(markers, key=lambda m: -len(m)))
        self._keep = re.compile(names) if markers else None
        self._header = self._missing_header()
        self._end = self._find_end()
        stops = tokenizer.stop_token_ids
        self._end_id = tokenizer.control[self._end] if self._end else None
        self.stop_token_ids = (
            stops
            if self._end_id is None
            else (self._end_id, *(s for s in stops if s != self._end_id))
        )
        self.tells_tools = self._tells_tools()
        self._check_content()
        self.template_sha256 = sha256_of(
            "template", tokenizer, parser.name, template=template, names=tokenizer.special_tokens
        )

    # --- Renderer -------------------------------------------------------------------------------------------------

    def with_options(self, options: Mapping[str, bool | str]) -> "TemplateRenderer":
        """See Renderer."""
        if not options:
            return self
        read = variables_of(self._template)
        for name, value in options.items():
            if name not in OPTIONS or name not in read:
                known = ", ".join(sorted(read & set(OPTIONS))) or "none"
                raise ValueError(f"{name!r:.80} is no option of this template; it reads {known}")
            if value not in OPTIONS[name]:
                told = ", ".join(map(repr, OPTIONS[name]))
                raise ValueError(f"{name} is {value!r:.80}; it may be {told}")
        twin = copy(self)
        twin._options = {**self._options, **options}
        return twin

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> np.ndarray:
        """See Renderer."""
        check_first(messages)
        return self._ids(self._whole(answering(messages), tools))

    def next(
        self, messages: Sequence[Message], *, closed: bool, calls: Sequence[ToolCall] = ()
    ) -> np.ndarray:
        """See Renderer."""
        rendering = self._suffix(messages, calls)
        if closed and self._end:
            rendering = replace(rendering, text=rendering.text.partition(self._end)[2])
        return self._ids(rendering)

    def rewritten(
        self,
        messages: Sequence[Message],
        turns: Sequence[np.ndarray],
        seen: np.ndarray,
        tools: Tools = (),
    ) -> np.ndarray | None:
        """See Renderer."""
        num_said = sum(message.role == "assistant" for message in messages)
        first = num_said - len(turns)
        said = {i: self.parse(turn, tools).tool_calls for i, turn in enumerate(turns, first)}
        rendering = self._whole(answering(messages, said=said), tools)
        kept = []
        for ordinal, tokens in enumerate(turns, first):
            found = self._find_kept(rendering, FIRST_SAID - ordinal, tokens)
            kept += [found] if found else []
        ids = self._ids(rendering, kept)
        return None if np.array_equal(ids, seen) else ids

    def said(self, message: Message) -> np.ndarray:
        """See Renderer."""
        content, text = encodable(message.content), encodable(message.content)
        if message.tool_calls:
            text = encodable(self.parser.write(message.tool_calls, content))
        ids = self.tokenizer.encode_said(text, self.parser.markers, len(content))
        return np.array([*ids, self.stop_token_ids[0]], np.int32)

    def text(self, tokens: np.ndarray) -> str:
        """See Renderer."""
        return text_of(self.tokenizer, self.stop_token_ids, tokens)

    def is_closed(self, tokens: np.ndarray) -> bool:
        """See Renderer."""
        return len(tokens) > 0 and int(tokens[-1]) == self._end_id

    def parse(self, tokens: np.ndarray, tools: Tools = ()) -> Action:
        """See Renderer."""
        return read_action(self.parser, self.text(tokens), tools)

    # --- renderings -----------------------------------------------------------------------------------------------

    def _whole(self, messages: Sequence[Message], tools: Tools) -> Rendering:
        if tools and not self.tells_tools:
            messages, tools = with_tools(messages, tools, self.parser), ()
        return self._first_taken(self._ways(messages), tools)

    def _suffix(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> Rendering:
        """From behind an assistant's words on."""
        plain = [Message("user", USER), Message("assistant", SAID)]
        # Ids that the policy made up may be refused; ours are not.
        ways = [
            (way, one) for way in self._ways(messages) for one in ((calls, ()) if calls else ((),))
        ]
        errors = []
        for way, asked in ways:
            # Some templates want to see the call that a tool answers.
            called = replace(plain[1], tool_calls=tuple(calls_for(way, asked)))
            for turn in (plain[1], called) if called.tool_calls and self._end else (plain[1],):
                try:
                    found = self._rendered([plain[0], turn, *answering(way, asked)], ())
                except TemplateLimitError:
                    raise
                except ValueError as error:
                    errors.append(error)
                    continue
                tail = found.text.rpartition(SAID)[2]
                if turn.tool_calls:
                    tail = str(self._end) + tail.partition(str(self._end))[2]
                return replace(found, text=tail)
        raise errors[0]

    def _ways(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        """The messages as they are, then in the ways in which a template may take what it refused."""
        way = list(messages)
        yield way
        for change in (self._calls_as_text, tools_as_users, systems_as_users, joined):
            changed = change(way)
            if changed != way:
                way = changed
                yield way

    def _first_taken(self, ways: Iterator[list[Message]], tools: Tools) -> Rendering:
        errors = []
        for way in ways:
            own = own_ids(way)  # ids that somebody made up may be refused; ours are not
            for asked in (way, own) if own != way else (way,):
                try:
                    return self._rendered(asked, tools)
                except TemplateLimitError:
                    raise
                except ValueError as error:
                    errors.append(error)
        raise errors[0]

    def _rendered(self, messages: Sequence[Message], tools: Tools = ()) -> Rendering:
        """Raises ValueError where the template refuses the messages, or leaves one out."""
        try:
            plain = self._said_as(None, messages, tools)
        except TemplateLimitError:
            raise
        except ValueError:
            plain = None
        first = None
        for mark_ends in (True, False):
            marks = Marks(self._template, mark_ends)
            text = self._said_as(marks, messages, tools)
            if first is None:
                check_complete(text, marks, messages, self._where)
            first = first or Rendering(text, marks)
            if plain is not None and marks.plain(text) == plain:
                return Rendering(text, marks)
        assert first is not None
        return first  # a content imitates what the template looks for: it is taken as any other

    def _said_as(
        self,
        marks: Marks | None,
        messages: Sequence[Message],
        tools: Tools,
        prompt: bool = True,
    ) -> str:
        told = [
            as_dict(message, owner, marks, self._keep)
            for message, owner in zip(messages, owners(messages))
        ]
        text = self._render(
            marks,
            messages=told,
            tools=[schema(tool, marks) for tool in tools] or None,
            documents=None,
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens,
            **self._options,
        )
        return text + self._header if prompt else text

    def _ids(
        self, rendering: Rendering, kept: Sequence[tuple[int, int, np.ndarray]] = ()
    ) -> np.ndarray:
        """Tokens of a rendering. kept: (start, end, tokens) of the places whose tokens are known."""
        out: list[int] = []
        at = 0
        for start, end, tokens in (
            *sorted(kept, key=lambda k: k[0]),
            (len(rendering.text), 0, None),
        ):
            for piece in self.tokenizer.control_pieces(rendering.text[at:start]):
                is_token = isinstance(piece, int)
                out += [piece] if is_token else self.tokenizer.encode(rendering.marks.plain(piece))
            if tokens is not None:
                out += tokens.tolist()
                at = end
        return np.array(out, np.int32)

    def _find_kept(
        self, rendering: Rendering, owner: int, tokens: np.ndarray
    ) -> tuple[int, int, np.ndarray] | None:
        """Where a turn's words stand in a rendering, whole or from a token on, and those tokens."""
        if len(tokens) and int(tokens[-1]) in self.stop_token_ids:
            tokens = tokens[:-1]
        runs = rendering.marks.owns(rendering.text, owner)
        if not runs:
            return None
        text, said = rendering.marks.plain(rendering.text), self.tokenizer.decode(tokens)
        start, end = runs[-1]
        at = said.rfind(text[start:end])
        begin = start - at
        if at >= 0 and 0 <= begin <= runs[0][0] and text[begin : begin + len(said)] == said:
            return begin, begin + len(said), tokens
        rest = said[at:]
        if at < 0 or text[start : start + len(rest)] != rest:
            return None
        low, high = 0, len(tokens)  # the last token from which on at least `rest` is said
        while high - low > 1:
            middle = (low + high) // 2
            if len(self.tokenizer.decode(tokens[middle:])) >= len(rest):
                low = middle
            else:
                high = middle
        if self.tokenizer.decode(tokens[low:]) != rest:
            return None
        return start, start + len(rest), tokens[low:]

    def _calls_as_text(self, messages: list[Message]) -> list[Message]:
        return [
            Message(m.role, self.parser.write(m.tool_calls, m.content)) if m.tool_calls else m
            for m in messages
        ]

    # --- what the template does -----------------------------------------------------------------------------------

    def _special(self) -> set[str]:
        return {text for text in self.tokenizer.control if text not in self.tokenizer.speakable}

    def _probe(self, messages: Sequence[Message], prompt: bool = True) -> str:
        return self._said_as(None, messages, (), prompt)

    def _missing_header(self) -> str:
        """The assistant's header, of a template that ignores add_generation_prompt and would not write it."""
        self._header = ""
        user = [Message("user", USER)]
        asked = self._probe(user)
        if asked != self._probe(user, prompt=False):
            return ""
        whole = self._probe([*user, Message("assistant", SAID)], prompt=False)
        between = whole.partition(USER)[2].partition(SAID)[0]
        tail = asked.partition(USER)[2]
        rest = between[len(tail) :] if between.startswith(tail) else ""
        return rest if rest.strip() else ""

    def _find_end(self) -> str | None:
        """The control token that closes what the assistant said; None if the template writes none.

        Raises ValueError for one that only another model's tokenizer has.
        """
        whole = self._probe([Message("user", USER), Message("assistant", SAID)], prompt=False)
        if USER not in whole or SAID not in whole:
            raise ValueError(f"{self._where} does not say what a user and an assistant say")
        pieces = self.tokenizer.control_pieces(whole.rpartition(SAID)[2])
        ending = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        if MARKUP.search(ending):  # headers may be text (Zephyr's are), the end of a turn may not
            unknown = [
                t for t in dict.fromkeys(MARKUP.findall(whole)) if t not in self.tokenizer.control
            ]
            raise ValueError(
                f"{self._where} writes {', '.join(unknown)}, which the tokenizer beside it has as no token: they are"
                " of different models; copy both from one"
            )
        names = {token: text for text, token in self.tokenizer.control.items()}
        return next((names[piece] for piece in pieces if isinstance(piece, int)), None)

    def _tells_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": TOOL, "description": "", "parameters": {}}}
        try:
            return TOOL in self._said_as(None, [Message("user", USER)], [tool])
        except TemplateLimitError:
            raise
        except ValueError:
            return False

    def _check_content(self) -> None:
        """Raises ValueError for a template whose rendering of plain text is not that text in a scaffold."""
        talk = [
            Message("user", " What is 2 + 2?\n\nSay it in one word. "),
            Message("assistant", "Four."),
            Message("user", "Sure?"),
        ]
        found = self._rendered(talk)
        if found.marks.plain(found.text) != self._probe(talk):
            raise ValueError(
                f"{self._where} changes what is said (letters or words of it), so that content cannot be told from its"
                " own text; use a template that only trims it"
            )
