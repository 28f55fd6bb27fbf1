"""JSON schema: 1.0 if the last turn's text is JSON that the task's schema allows, else 0.0. Extra: jsonschema.

The text is JSON as a whole, or in one fence of ``` or ```json and nothing round it. NaN, Infinity and a key that stands
twice in an object are not JSON here. A schema's references lead into the schema itself (#...): nothing is fetched. Its
patterns run on the policy's text, so the deadline holds for them as for regex_match.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from rl_jax import strict_json
from rl_jax.rewards.answers import last_text, needed
from rl_jax.types import EpisodeView, Reward, Task

MAX_DEPTH = 100  # of what is validated: the validator recurses
FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


class JsonSchema:
    """payload["schema"], by the dialect that its $schema names, else draft 2020-12."""

    version = "json_schema/1"

    def __init__(self):
        """Raises: ImportError where the extra is missing."""
        import jsonschema

        self._validators, self._error = jsonschema.validators, jsonschema.SchemaError

    def score(self, task: Task, episode: EpisodeView) -> Reward:
        """Raises ValueError for a task without a schema, or with one that is none or leads elsewhere."""
        schema = needed(task, "schema", dict, "json_schema")
        if elsewhere := [ref for ref in references(schema) if not str(ref).startswith("#")]:
            raise ValueError(
                f"task {task.id}: payload['schema'] refers to {elsewhere[0]!r:.200}, which is not fetched"
            )
        kind = self._validators.validator_for(schema, default=self._validators.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except self._error as error:
            said = f"task {task.id}: payload['schema'] is no schema: {error.message}"
            raise ValueError(said[:500]) from None
        try:
            said = parsed(last_text(episode))
        except (ValueError, RecursionError):
            value = 0.0
        else:
            value = float(kind(schema).is_valid(said))
        return Reward(value, {"json_schema": value}, (), "scored", self.version)


def references(schema: Any) -> Iterator[Any]:
    """All that its $ref and $dynamicRef name."""
    level = [schema]
    while level:
        value = level.pop()
        if isinstance(value, dict):
            yield from (value[key] for key in ("$ref", "$dynamicRef") if key in value)
            level += value.values()
        elif isinstance(value, list):
            level += value


def parsed(text: str) -> Any:
    """Raises: ValueError, RecursionError for what is no JSON."""
    fenced = FENCE.fullmatch(text)
    said = json.loads(
        fenced[1] if fenced else text, object_pairs_hook=_object, parse_constant=_no_constant
    )
    if strict_json.is_deeper(said, MAX_DEPTH):
        raise ValueError(f"deeper than {MAX_DEPTH}")
    return said


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(name)
