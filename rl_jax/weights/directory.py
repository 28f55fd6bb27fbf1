"""publish_directory: the weights of a Hugging Face directory onto servers, without a learner.

Life: 1 The directory's files are checked against their digests, where it has any, and against the model's shapes.
2 Each server stages them beside those that it serves with, and digests what it holds. 3 The digests must be equal, and
be the one that was asked for, if one was. 4 Prefill servers commit, then decode servers. Up to 4 nothing has changed:
any fault discards what was staged, and the old version serves on. A server that does not commit is fenced.
Must not: be called twice at once (the caller's), or give a version twice.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_jax.models import hf
from rl_jax.models.hf_files import INDEX, SUMS, weight_files
from rl_jax.models.model import Model
from rl_jax.types import Ack, Digest


class PublishError(RuntimeError):
    """Weights that were not published; the old version serves on. One line."""


@dataclass(frozen=True)
class Published:
    version: int
    digest: str  # sha256, hex
    acks: tuple[Ack, ...]
    fenced: tuple[str, ...]


def digest_text(digest: Digest) -> str:
    """One hex sha256 of all parameters' digests."""
    told = repr(sorted((name, *map(int, pair)) for name, pair in digest.values.items()))
    return hashlib.sha256(told.encode()).hexdigest()


def files_of(directory: Path) -> list[Path]:
    """What publish_directory needs of a directory. Raises: hf.WeightsError."""
    names = [*weight_files(directory), "config.json", INDEX, SUMS]
    return [path for name in names if (path := directory / name).is_file()]


def publish_directory(
    directory: Path | str,
    model: Model,
    targets: Sequence[Any],
    version: int,
    kv: str,
    *,
    deadline_s: float,
    expected: str = "",
) -> Published:
    """targets: SyncTargets of this process, prefill servers first. kv: recompute | keep. expected: digest_text.

    Raises: PublishError, with nothing changed; hf.WeightsError, likewise.
    """
    sync_id = f"directory.{version}"
    try:
        digests = {}
        for target in targets:
            arrays = hf.load(directory, model, target.param_shardings, model.settings.dtype)
            target.stage(sync_id, version, 0, arrays)
            del arrays
            digests[target.name] = target.digest(sync_id)
        first = next(iter(digests.values()))
        for name, digest in digests.items():
            if different := digest.differing(first):
                raise PublishError(
                    f"{name} holds other weights than {next(iter(digests))}: {different[:3]}"
                )
        told = digest_text(first)
        if expected and expected != told:
            raise PublishError(f"{directory} has the digest {told}, not {expected}")
    except BaseException:
        for target in targets:
            target.discard(sync_id)
        raise
    acks, fenced = [], []
    for target in targets:
        try:
            acks.append(target.commit(sync_id, kv, deadline_s))
        except (TimeoutError, RuntimeError, KeyError, ValueError) as error:
            target.fence(f"it did not take version {version}: {error}")
            fenced.append(target.name)
    if not any(target.kind == "decode" and target.name not in fenced for target in targets):
        raise PublishError(f"no decode server took version {version}: all are fenced")
    return Published(version, told, tuple(acks), tuple(fenced))
