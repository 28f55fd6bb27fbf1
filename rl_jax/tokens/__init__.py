"""Tokenizers, chat rendering and tool calls: the only text <-> token conversion of the system.

Owns: the vocabulary, the conversation's scaffold (who speaks, where a turn ends) and the parsing of what was sampled.

Invariants
    Content never yields a control token: the text "<|user|>" in an observation is plain text. Control tokens come from
    the scaffold, or were sampled.
    Rendering only appends: first() makes the first context; every later context is context + sampled tokens +
    next(...). Nothing that was seen or sampled is rendered again, so no text is ever re-tokenised and trained tokens
    are the tokens the policy saw. Where a template would show another history, rewritten() says so and gives it.
    decode(encode(text)) == text for every text without lone surrogates (and with no normalizer in the tokenizer). A
    lone surrogate (half of a UTF-16 pair, which no UTF-8 can hold) becomes U+FFFD when it is encoded, in every
    tokenizer; Message.content keeps it.

Life of a conversation
    1. first(messages, tools): system and user messages, up to and with the assistant's header
    2. the policy samples until one of stop_token_ids, or its budget
    3. parse(sampled, tools) gives the Action that the environment receives
    4. next(messages, closed=...): [the end token if the policy did not sample it], messages, the assistant's header
    5. back to 2.

Importing it imports neither `tokenizers` nor `jinja2`: load.py does, where a directory is named.
Must not: see an environment, a reward or a device array.
"""

from rl_jax.tokens.byte import ByteTokenizer
from rl_jax.tokens.chat import ChatRenderer
from rl_jax.tokens.renderer import Renderer
from rl_jax.tokens.tokenizer import ROLES, Tokenizer, encodable

__all__ = [
    "ROLES",
    "TOKENIZERS",
    "TOOL_PARSERS",
    "ByteTokenizer",
    "ChatRenderer",
    "Renderer",
    "Tokenizer",
    "encodable",
]

# name -> "module:attribute"; a directory with a tokenizer.json, or "package.module:attribute", is a name too.
TOKENIZERS: dict[str, str] = {"byte": "rl_jax.tokens:ByteTokenizer"}

# name -> "module:attribute" of a ToolParser; "auto" (the one of the chat template) and "package.module:attribute" too.
TOOL_PARSERS: dict[str, str] = {
    "hermes": "rl_jax.tokens.hermes:Hermes",
    "llama3_json": "rl_jax.tokens.llama_json:LlamaJson",
    "mistral": "rl_jax.tokens.mistral:Mistral",
    "gemma": "rl_jax.tokens.gemma:Gemma",
}
