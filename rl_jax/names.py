"""A name of a literal table, or "package.module:attribute" -> the object. Processes of a run do it as the driver does.

Must not: know which tables there are.
"""

import importlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from rl_jax.config import ConfigError


def resolve(name: str, table: Mapping[str, Any]) -> Any:
    """The object behind a name. Raises: ConfigError."""
    entry = table.get(name, name)
    path = entry[0] if isinstance(entry, tuple) else entry
    module, _, attribute = path.partition(":")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError([f"{name} cannot be loaded: {type(error).__name__}: {error}"]) from error
