"""What the settings of whatever looks at a run from outside may not be together.

Must not: look at this machine (watching.check_watch does), or import a tracker.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl_jax.asgi import is_loopback
from rl_jax.settings import MetricsSettings
from rl_jax.trackers import TRACKERS


def watch_errors(
    m: MetricsSettings, check_name: Callable[[str, str, Mapping[str, Any]], list[str]]
) -> Iterator[str]:
    """One line for each thing that is wrong."""
    for name in m.trackers:
        yield from check_name("metrics.trackers", name, TRACKERS)
    if len(set(m.trackers)) < len(m.trackers):
        yield f"metrics.trackers={m.trackers} names one twice; name each once"
    for name, options in m.tracker_options.items():
        if name not in m.trackers:
            has = ", ".join(m.trackers) or "none"
            yield f"metrics.tracker_options.{name}: metrics.trackers does not name it; it has {has}"
        if not isinstance(options, Mapping):
            yield f"metrics.tracker_options.{name}={options!r} must be a mapping of keyword arguments"
    if m.port and not m.token_file and not is_loopback(m.host):
        yield (
            f"metrics.host={m.host} is open to others: give metrics.token_file, whose one line they must send, or use"
            " 127.0.0.1"
        )
    if m.token_file and not m.port:
        yield f"metrics.token_file={m.token_file} with metrics.port=0: nothing is exported; set a port"
