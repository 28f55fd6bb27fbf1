"""What a pretrained model's files tell before there is a run directory: the headers of its weights.

Owns: `check_weights`, which finds in a second what loading would find in minutes. Names, shapes and dtypes are compared
by the loader's own function (hf.check_headers); values and digests are left to the loader.
Each finding is one line of a ConfigError. Must not: read a weight, or write.
"""

from rl_jax.build_roles import TRAINING, Setting
from rl_jax.config import ConfigError
from rl_jax.models import MODELS, hf
from rl_jax.models.hf_files import WeightsError
from rl_jax.models.model import Model
from rl_jax.role_source import GIVEN, find_source

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
