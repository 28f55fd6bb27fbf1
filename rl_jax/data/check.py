"""What is wrong with the data section of a config, with its algorithm and mode; one line each.

Invariant: what the algorithm or the mode would not read is refused. Must not: read a file.
"""

from collections.abc import Iterator

from rl_jax.data.rows import DataError, find_files
from rl_jax.settings import DataSettings, Settings


def data_errors(s: Settings, rows: str, mode: str) -> Iterator[str]:
    """rows: what the algorithm learns from rows, of its table entry; "" = it reads none."""
    d, name = s.data, s.algorithm.name
    unread = set(vars(d))
    if rows and (d.path or rows == "chat"):
        unread = {"train_on"} if rows == "ends" else set()
        unread |= set() if d.path else {"eval_path", "train_on", "too_long"}
    why = f"{name} without data.path" if rows else f"algorithm {name}"
    for key in sorted(unread):
        if (value := getattr(d, key)) != getattr(DataSettings(), key):
            yield f"data.{key}={value} is not read by {why if not d.path or not rows else name}; leave it out"
    if rows == "ends" and mode != "train":
        yield f"--mode={mode}: {name} makes a reward model, which plays no episodes; use --mode=train"
    elif rows == "ends" and not d.path:
        yield f"algorithm.name={name} learns from pairs; set data.path to a file of JSON lines"
    if rows and mode == "rollout_only":
        yield f"--mode=rollout_only: {name} learns from rows; name an algorithm of episodes to sample for"
    if rows and d.path and mode == "train_only":
        yield f"data.path={d.path} is not read by --mode=train_only, which reads rollout.replay_dir; leave it out"
    if d.eval_path and d.eval_share:
        yield f"data.eval_share={d.eval_share} and data.eval_path={d.eval_path}: hold out by one of them"
    plays = rows == "chat" and not d.path and mode == "train"
    if plays and not any(source.script_episodes for source in s.tasks.sources):
        yield (
            f"algorithm.name={name} without data.path trains on scripts, but script_episodes of every task source is 0;"
            " set data.path, or give some"
        )
    for key in ("path", "eval_path"):
        if rows and mode == "train" and (value := getattr(d, key)):
            try:
                find_files(f"data.{key}", value)
            except DataError as error:
                yield str(error)
