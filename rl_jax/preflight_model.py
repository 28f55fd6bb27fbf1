"""What a pretrained model's files tell before there is a run directory: the headers of its weights, and what its chat
template makes of a history.

Owns: `check_weights`, which finds in a second what loading would find in minutes. Names, shapes and dtypes are compared
by the loader's own function (hf.check_headers); values and digests are left to the loader. What does not fit is one
line of a ConfigError. `history_notes`: whether a conversation of each task's own kind is shown as it was seen
(tokens/bridge.py); a template that shows another one is no fault, and told.
Must not: read a weight, or write.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rl_jax.build_roles import TRAINING, Setting
from rl_jax.config import ConfigError
from rl_jax.models import MODELS, hf
from rl_jax.models.hf_files import WeightsError
from rl_jax.models.model import Model
from rl_jax.preflight import Opening
from rl_jax.role_source import GIVEN, find_source
from rl_jax.settings import Settings
from rl_jax.tokens import Renderer
from rl_jax.tokens.bridge import THOUGHT, is_rewritten, talk_of
from rl_jax.types import Message

REFERENCE = "reference"


def check_weights(setting: Setting, model: Model, reads_source: bool) -> None:
    """That the directories that a run will load hold the models which their config.json says.

    model: the policy's.  reads_source: whether its weights come from model.source.
    Raises: ConfigError, a line for each directory that does not.
    """
    settings, errors = setting.settings, []
    found = [("model.source", settings.model.source, model)] if reads_source else []
    for where in (REFERENCE, *GIVEN) if setting.mode in TRAINING else ():
        path = getattr(settings, where).checkpoint
        if path and (source := find_source(where, path, settings.model)).is_pretrained:
            build = setting.resolve(source.model.family, MODELS)
            size = source.model.vocab_size or model.vocab_size
            found.append((f"{where}.checkpoint", path, build(source.model, size)))
    for key, path, of in found:
        try:
            hf.check_headers(path, of)
        except WeightsError as error:
            errors.append(f"{key}={path}: {str(error).removeprefix(f'{path}: ')}")
    if errors:
        raise ConfigError(errors)


def history_notes(
    settings: Settings,
    openings: Mapping[str, Opening],
    renderer: Renderer,
    played: Mapping[str, bool] = MappingProxyType({}),
) -> Iterator[str]:
    """A line for each way in which episodes of several turns are trained on another history than the template shows.

    openings: by tag.  played: by tag, whether an episode's history was rewritten, where one was played.
    """
    if settings.rollout.history != "keep":
        return
    tags: dict[str, list[str]] = {}
    for tag, opening in openings.items():
        if opening.max_turns > 1 and (what := _rewrites(opening, renderer, played.get(tag, False))):
            tags.setdefault(what, []).append(tag)
    for what, of in tags.items():
        yield (
            f"tag {', '.join(of)}: in later turns the chat template {what}; with rollout.history=keep the model is"
            " trained on what it saw, which differs from what the template renders: set rollout.history=template to"
            " follow it"
        )


def _rewrites(opening: Opening, renderer: Renderer, is_known: bool) -> str:
    """What the template does to the history of such a task; "" if it keeps it."""
    first, tools = opening.messages or (Message("user", "Hello."),), opening.tools
    try:
        if is_known or is_rewritten(renderer, talk_of(first, tools), tools):
            return "shows another history than was seen"
        if is_rewritten(renderer, talk_of(first, tools, THOUGHT), tools):
            return "drops the thoughts of earlier ones"
    except ValueError as error:  # its episodes may be of one turn
        return f"cannot show {'answers of tools' if tools else 'a user who answers'} ({error})"
    return ""
