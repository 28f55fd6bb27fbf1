"""Names of a config -> tokenizer, tool parser, renderer. What is imported here imports `tokenizers` and jinja2."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_jax.tokens import TOKENIZERS, TOOL_PARSERS, ChatRenderer, Renderer, Tokenizer
from rl_jax.tokens.hf import HfTokenizer
from rl_jax.tokens.template import TemplateRenderer
from rl_jax.tokens.tool_calls import ToolParser

AUTO = "auto"  # the parser of the template's family
TEMPLATE = "chat_template.jinja"

Resolve = Callable[[str, Mapping[str, Any]], Any]  # (name, literal table) -> the object

# A text that only templates of the family have -> its parser; the first that is found.
FAMILIES = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[INST]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
    ("<start_of_turn>", "gemma"),
)


def load_tokenizer(name: str, resolve: Resolve) -> Tokenizer:
    """Of a name in TOKENIZERS, a directory with a tokenizer.json, or "package.module:attribute". Raises ValueError."""
    if name and name not in TOKENIZERS and Path(name).is_dir():
        return HfTokenizer(name)
    return resolve(name, TOKENIZERS)()


def make_renderer(tokenizer: Any, parser: str, resolve: Resolve) -> Renderer:
    """Of a directory's own chat template, else of the house's format. parser: auto, or a name of TOOL_PARSERS.

    Raises ValueError: a directory without a template, or with one that cannot be used.
    """
    template = template_of(tokenizer) if isinstance(tokenizer, HfTokenizer) else ""
    name = parser if parser != AUTO else parser_name(template)
    parse: ToolParser = resolve(name, TOOL_PARSERS)()
    if isinstance(tokenizer, HfTokenizer):
        return TemplateRenderer(tokenizer, template, parse)
    return ChatRenderer(tokenizer, parse)


def parser_name(template: str) -> str:
    """The parser of a template's family; hermes where it says nothing of tools."""
    return next((name for text, name in FAMILIES if text in template), "hermes")


def template_of(tokenizer: HfTokenizer) -> str:
    """The text of the directory's chat template. Raises ValueError if there is none."""
    directory = tokenizer.directory
    if (path := directory / TEMPLATE).is_file():
        return path.read_text(encoding="utf-8")
    found: Any = tokenizer.config.get("chat_template")
    if found is None and (path := directory / "chat_template.json").is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no chat_template ({error})") from None
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str) or not found.strip():
        raise ValueError(
            f"{directory} has no chat template (no {TEMPLATE}, and no chat_template in tokenizer_config.json); put the"
            f" {TEMPLATE} of its family there"
        )
    return found
