"""What a config takes from model.source, a Hugging Face directory: the architecture; weights are taken by start.py.

The directory decides: a field that the config sets to something else is an error, not a change of the model. What it
does not decide (dtypes, the tokenizer, where a tokenizer is named) stays the config's. Invariant: the settings that
come out have every field filled in, so that a stored config says what the model is without the directory.
Must not: import jax, or read a weight.
"""

from dataclasses import fields, replace
from pathlib import Path

from rl_jax.models import hf_config
from rl_jax.settings import ModelSettings

TOKENIZER_FILE = "tokenizer.json"
OWN = ("source", "tokenizer", "dtype", "param_dtype")  # what a directory does not decide


def same_tokenizer(a: str, b: str) -> bool:
    """Whether two values of model.tokenizer give every text the same tokens: one name, or two copies of one file."""
    if a == b:
        return True
    files = [Path(name) / TOKENIZER_FILE for name in (a, b)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def with_source(model: ModelSettings) -> ModelSettings:
    """model with the architecture of model.source, an absolute path by then; model itself where it has no source.

    Raises: ValueError, one line a fault.
    """
    if not model.source:
        return model
    directory = Path(model.source).expanduser()
    try:
        found = hf_config.settings_of(hf_config.read(directory), model)
    except ValueError as error:
        raise ValueError(f"model.source={model.source}: {error}") from None
    default, errors = ModelSettings(), []
    for field in fields(ModelSettings):
        ours, theirs = getattr(model, field.name), getattr(found, field.name)
        if field.name not in OWN and ours not in (getattr(default, field.name), theirs):
            errors.append(
                f"model.{field.name}={ours} but model.source={model.source} has {theirs}; leave it out, the directory"
                " decides"
            )
    if errors:
        raise ValueError("\n".join(errors))
    return replace(found, source=str(directory.absolute()), tokenizer=model.tokenizer)
