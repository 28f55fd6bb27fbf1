"""What convert reads: a Hugging Face directory, a GGUF file, or a checkpoint of a run; each as a Model and its tensors.

Owns: `open_source`, which tells them apart, and `Origin`, what a conversion needs of any of them. Invariant: an Origin
that exists has passed every check of names, shapes and settings; nothing was written yet.
Must not: write, or print.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax import schema
from rl_jax.algorithms.options import entry_of
from rl_jax.checkpoint import Checkpointer, CheckpointError
from rl_jax.models import hf, hf_config
from rl_jax.models.decoder import build_model
from rl_jax.models.gguf import GGUF
from rl_jax.models.gguf_tokens import build_tokenizer, write_tokenizer
from rl_jax.models.hf_files import BESIDE, WeightsError, check_digests, copy_beside
from rl_jax.models.model import Model
from rl_jax.resume import checkpoint_of, step_of, stored_config
from rl_jax.settings import CheckpointSettings, ModelSettings, Settings
from rl_jax.tokens import TOKENIZERS

PARAMS = "params/"
FAMILY = "decoder"  # of MODELS; a plugin's weights have other names


@dataclass(frozen=True)
class Origin:
    path: Path
    what: str  # for a person
    model: Model
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]]  # by Hugging Face names: dtype and shape
    tensors: Callable[[], Iterator[tuple[str, np.ndarray]]]  # in that order and these dtypes
    config: Callable[[str], dict[str, Any]]  # dtype -> config.json
    write_files: Callable[[Path], list[str]]  # tokenizer and what goes with it; the names written


class SourceError(ValueError):
    """A source that cannot be converted; one line; exit code 2."""


def open_source(path: Path, files_from: Path | None) -> Origin:
    """What SRC is. files_from: where a checkpoint's tokenizer lies, if not where its run says.

    Raises: SourceError, WeightsError, CheckpointError, RunDirError: one line.
    """
    if path.is_file():
        return _from_gguf(path)
    if not path.is_dir():
        raise SourceError(
            f"{path} does not exist; name a Hugging Face directory, a GGUF file or a run directory"
        )
    if checkpoint_of(path) is not None:
        return _from_run(path, files_from)
    return _from_directory(path)


def _from_directory(path: Path) -> Origin:
    config = _read(path)
    model = _model(path, config)
    with hf.Source(path, model) as source:
        check_digests(path, source.weights.files)
        specs = source.specs()
    vocab_size = model.vocab_size

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        with hf.Source(path, model) as source:
            yield from source.theirs()

    return Origin(
        path=path,
        what=f"Hugging Face directory of a {config['model_type']}",
        model=model,
        specs=specs,
        tensors=tensors,
        config=lambda dtype: hf_config.exported(model.settings, vocab_size, dtype, config),
        write_files=lambda directory: copy_beside(path, directory),
    )


def _from_gguf(path: Path) -> Origin:
    file = GGUF(path)
    config = file.config()
    model = _model(path, config)
    file.check(model)
    metadata = file.tokenizer()
    try:
        size = build_tokenizer(metadata).get_vocab_size()
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    if size > model.vocab_size:
        raise WeightsError(
            f"{path}: {size} tokens, but the embedding has {model.vocab_size} rows; fetch it again"
        )

    def write_files(directory: Path) -> list[str]:
        write_tokenizer(directory, metadata)
        return [name for name in BESIDE if (directory / name).is_file()]

    licence = file.metadata("general.license", "not stated")
    return Origin(
        path=path,
        what=f"GGUF file of arch {file.arch}, {file.metadata('general.name', 'unnamed')}, licence {licence}",
        model=model,
        specs=hf.specs(model, np.float32),
        tensors=lambda: file.tensors(model),
        config=lambda dtype: {**config, "torch_dtype": dtype},
        write_files=write_files,
    )


def _from_run(path: Path, files_from: Path | None) -> Origin:
    """The policy of a checkpoint, in the dtype it is trained in."""
    import jax
    from jax.sharding import SingleDeviceSharding

    checkpoint = checkpoint_of(path)
    assert checkpoint is not None, "open_source looked"
    run = checkpoint.absolute().parent.parent
    settings = schema.build(Settings, stored_config(run), "", [])
    if entry_of(settings.algorithm).makes_scores:
        raise SourceError(
            f"{path} is a reward model: it has a score and no head over the vocabulary; export a policy"
        )
    if settings.model.family != FAMILY:
        raise SourceError(
            f"{path} is of family {settings.model.family}; only {FAMILY} has Hugging Face names"
        )
    reader, step = Checkpointer(run, CheckpointSettings()), step_of(checkpoint)
    leaves = _leaves(reader, step, checkpoint)
    dtype, (vocab_size, _) = leaves[f"{PARAMS}embed"]
    context = settings.model.max_context or settings.engine.context
    folders = [files_from] if files_from is not None else _folders(settings.model)
    configs = [f for f in folders if (f / hf_config.CONFIG).is_file()]
    source = _read(configs[0]) if configs else None
    try:
        model = build_model(replace(settings.model, max_context=context), vocab_size)
        hf_config.config_of(model.settings, vocab_size)  # that there is such a family
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    place = SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(
            spec.shape, leaves.get(PARAMS + name, [spec.dtype])[0], sharding=place
        )
        for name, spec in model.abstract.items()
    }
    params = reader.restore(step, {"params": abstract}, subset=True)[0]["params"]
    return Origin(
        path=path,
        what=f"step {step} of run {settings.run_id}",
        model=model,
        specs=hf.specs(model, dtype),
        tensors=lambda: hf.outgoing(model, params),
        config=lambda dtype: hf_config.exported(model.settings, vocab_size, dtype, source),
        write_files=lambda directory: [n for f in folders for n in copy_beside(f, directory)],
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return hf_config.read(path)
    except ValueError as error:
        raise SourceError(str(error)) from None


def _model(path: Path, config: Mapping[str, Any]) -> Model:
    """The model that a config.json describes."""
    try:
        settings = hf_config.settings_of(config, ModelSettings())
        return build_model(settings, settings.vocab_size)
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None


def _leaves(reader: Checkpointer, step: int, checkpoint: Path) -> dict[str, Any]:
    """name -> [dtype, shape] of what a checkpoint holds."""
    try:
        leaves = reader.manifest(step)["leaves"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be read ({error}); give another checkpoint"
        ) from None
    if f"{PARAMS}embed" not in leaves:
        raise CheckpointError(
            f"{checkpoint} has no policy (no {PARAMS}embed); give a run's checkpoint"
        )
    return leaves


def _folders(settings: ModelSettings) -> list[Path]:
    """Where a run's model and tokenizer came from, the tokenizer's last; () for one that is code.

    Raises: SourceError if one is gone.
    """
    is_code = settings.tokenizer in TOKENIZERS or ":" in settings.tokenizer
    names = dict.fromkeys([settings.source, "" if is_code else settings.tokenizer])
    folders = [Path(name) for name in names if name]
    for folder in folders:
        if not folder.is_dir():
            raise SourceError(
                f"the run's model or tokenizer came from {folder}, which is not there; put it back, or give it with"
                " --files_from=DIR"
            )
    return folders
