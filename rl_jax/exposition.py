"""What the processes of a run tell Prometheus: the one table of families, and the text of them.

Owns: FAMILIES, every name that an exporter of ours may use beside those of metrics rows (row_name); `Text`, which
refuses other names. The dashboard and the alert rules are tested against both. Names that vLLM has are vLLM's, with its
meaning and unit; ours begin with rl_jax:, those of the process itself are Prometheus' own.
Invariants: lines of one family stand together, each series once; labels are escaped, and none is chosen by a policy, an
environment or a client; what is not known is absent, never 0. stdlib only.
"""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# name -> (kind, meaning)
FAMILIES: Mapping[str, tuple[str, str]] = {
    "process_resident_memory_bytes": ("gauge", "memory of the process"),
    "process_cpu_seconds_total": ("counter", "user and system time of the process"),
    "process_open_fds": ("gauge", "open files of the process"),
    "vllm:num_requests_running": ("gauge", "requests that a server generates or fills for"),
    "vllm:num_requests_waiting": ("gauge", "requests that wait there"),
    "vllm:kv_cache_usage_perc": ("gauge", "share of the KV cache's pages that are in use; 0 to 1"),
    "vllm:prompt_tokens_total": ("counter", "tokens of contexts whose KV the server computed"),
    "vllm:generation_tokens_total": ("counter", "tokens that the server sampled"),
    "vllm:num_preemptions_total": ("counter", "requests that lost their pages to others"),
    "vllm:request_success_total": ("counter", "turns that ended, by finished_reason"),
    "vllm:time_to_first_token_seconds": ("histogram", "queue, prefill, transfer and the first block of a turn"),
    "vllm:time_per_output_token_seconds": ("histogram", "a turn's seconds behind its first token, a token"),
    "vllm:e2e_request_latency_seconds": ("histogram", "a turn, from its arrival to its end"),
    "vllm:request_queue_time_seconds": ("histogram", "a turn's wait for a slot"),
    "vllm:request_prefill_time_seconds": ("histogram", "a turn's prefill"),
    "rl_jax:info": ("gauge", "1, of the run that its labels name"),
    "rl_jax:attempt": ("gauge", "which process works in the run directory, from 0"),
    "rl_jax:step": ("gauge", "the last step whose row is written"),
    "rl_jax:steps": ("gauge", "the step at which the run ends"),
    "rl_jax:seconds_since_row": ("gauge", "since the last row of metrics"),
    "rl_jax:paused": ("gauge", "1 while the run is paused"),
    "rl_jax:weight_version": ("gauge", "version of the weights that are served, or trained"),
    "rl_jax:fleet_state": ("gauge", "1 for the state that a server is in, 0 for the others"),
    "rl_jax:episode_states": ("gauge", "attempts at episodes by the state they are in now"),
    "rl_jax:driver_lag_seconds": ("gauge", "how long the rollout's event loop took to answer; 1 is no answer"),
    "rl_jax:queue_rejects_total": ("counter", "requests refused, as the queue was full or they did not fit"),
    "rl_jax:aborts_total": ("counter", "turns that were aborted"),
    "rl_jax:turn_errors_total": ("counter", "turns that ended in an error of a server"),
    "rl_jax:blocks_total": ("counter", "blocks of decode steps that a server dispatched"),
    "rl_jax:swaps_total": ("counter", "versions that a server went over to"),
    "rl_jax:device_bytes_in_use": ("gauge", "memory of a device in use, where the backend says so"),
    "rl_jax:device_bytes_limit": ("gauge", "memory of a device that may be used"),
    "rl_jax:learner_steps_total": ("counter", "steps that a learner's process did"),
    "rl_jax:orders_total": ("counter", "orders of the driver that a process began, by verb"),
    "rl_jax:worker_lines_total": ("counter", "lines to and from a worker's process, by direction"),
    "rl_jax:workers": ("gauge", "processes of environments or scorers that live"),
    "rl_jax:workers_busy": ("gauge", "of these, those that work"),
    "rl_jax:calls_waiting": ("gauge", "calls of scorers that wait for a worker"),
    "rl_jax:busy_seconds_total": ("counter", "seconds in which scorers worked"),
    "rl_jax:pool_events_total": ("counter", "what befell workers: restarts, timeouts, failures"),
    "rl_jax:tracker_lost_total": ("counter", "items that a tracker did not take"),
}  # fmt: skip

FLEET_STATES = ("starting", "live", "suspect", "fenced", "gone")
_ROW = re.compile(r"[^a-zA-Z0-9_]")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def row_name(metric: str) -> tuple[str, dict[str, str]]:
    """A name of metrics rows -> (Prometheus name, labels): reward/mean.sums -> rl_jax:reward_mean{of="sums"}."""
    name, _, of = metric.partition(".")
    return f"rl_jax:{_ROW.sub('_', name)}", {"of": of} if of else {}


class Histogram:
    """One writer; its buckets are cumulative in the text."""

    def __init__(self, bounds: Sequence[float] = SECONDS):
        self.bounds, self.counts = tuple(bounds), [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        at = next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[at] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """labels: as text, without braces; may be empty."""
        counts, total, comma = list(self.counts), 0, "," if labels else ""
        braces = f"{{{labels}}}" if labels else ""
        for bound, count in zip((*self.bounds, "+Inf"), counts):
            total += count
            yield f'{name}_bucket{{{labels}{comma}le="{bound}"}} {total}'
        yield f"{name}_sum{braces} {self.sum:.17g}"
        yield f"{name}_count{braces} {total}"


class Text:
    """Families in the order of their first line."""

    def __init__(self, **labels: str):
        """labels: of every line."""
        self._labels = labels
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """None adds nothing. Raises: KeyError for a name that FAMILIES lacks."""
        if value is not None:
            self._rows(name, FAMILIES[name][0]).append(f"{name}{self._braces(labels)} {value:.17g}")

    def histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        braces = self._braces(labels)
        self._rows(name, "histogram").extend(histogram.lines(name, braces[1:-1]))

    def row(self, values: Mapping[str, float]) -> None:
        """The last value of each name of metrics rows, as gauges."""
        for metric, value in sorted(values.items()):
            name, labels = row_name(metric)
            self._rows(name, "gauge").append(f"{name}{self._braces(labels)} {value:.17g}")

    def __str__(self) -> str:
        return "".join(f"{line}\n" for lines in self._lines.values() for line in lines)

    def _rows(self, name: str, kind: str) -> list[str]:
        if name not in self._lines:
            meaning = FAMILIES.get(name, (kind, ""))[1]
            told = [f"# HELP {name} {meaning}"] if meaning else []
            self._lines[name] = [*told, f"# TYPE {name} {kind}"]
        return self._lines[name]

    def _braces(self, labels: Mapping[str, str]) -> str:
        both = {**self._labels, **labels}
        inside = ",".join(f'{name}="{escaped(value)}"' for name, value in both.items())
        return f"{{{inside}}}" if inside else ""


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class TurnTimes:
    """Histograms of turns; `add` from one thread at a time, `tell` from any."""

    def __init__(self) -> None:
        names = ("ttft", "tpot", "e2e", "queue", "prefill")
        self._of = {name: Histogram() for name in names}
        self._lock = threading.Lock()

    def add(self, times_s: Mapping[str, float], num_tokens: int) -> None:
        """times_s: of types.Turn. What it lacks is not told."""
        queue_s, prefill_s = times_s.get("queue"), times_s.get("prefill")
        decode_s, first_s = times_s.get("decode"), times_s.get("first_token")
        if queue_s is None or prefill_s is None or decode_s is None:
            return
        before_s = queue_s + prefill_s + times_s.get("transfer", 0.0)
        with self._lock:
            self._of["queue"].add(queue_s)
            self._of["prefill"].add(prefill_s)
            self._of["e2e"].add(before_s + decode_s)
            if first_s is not None and num_tokens > 0:
                self._of["ttft"].add(before_s + first_s)
                if num_tokens > 1:
                    self._of["tpot"].add(max(0.0, decode_s - first_s) / (num_tokens - 1))

    def tell(self, text: Text, **labels: str) -> None:
        names = {
            "ttft": "vllm:time_to_first_token_seconds",
            "tpot": "vllm:time_per_output_token_seconds",
            "e2e": "vllm:e2e_request_latency_seconds",
            "queue": "vllm:request_queue_time_seconds",
            "prefill": "vllm:request_prefill_time_seconds",
        }
        with self._lock:
            for name, histogram in self._of.items():
                text.histogram(names[name], histogram, **labels)


def tell_process(text: Text) -> None:
    """Of this process, on Linux."""
    times = os.times()
    text.add("process_cpu_seconds_total", times.user + times.system)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        text.add("process_resident_memory_bytes", pages * os.sysconf("SC_PAGE_SIZE"))
        text.add("process_open_fds", len(os.listdir("/proc/self/fd")))
    except (OSError, ValueError, IndexError):
        return  # not Linux


def tell_devices(text: Text, devices: Iterable[Any]) -> None:
    """Memory of jax devices, where their backend says something."""
    for device in devices:
        stats = device.memory_stats() or {}
        label = {"device": str(device.id)}
        text.add("rl_jax:device_bytes_in_use", stats.get("bytes_in_use"), **label)
        text.add("rl_jax:device_bytes_limit", stats.get("bytes_limit"), **label)


def tell_server(text: Text, server: Any) -> None:
    """One decode or prefill server of this process, by its stats()."""
    stats, label = server.stats(), {"server": server.name}
    count = lambda name, *keys: text.add(
        name, sum(stats[k] for k in keys) if all(k in stats for k in keys) else None, **label
    )
    text.add(
        "vllm:num_requests_running", stats.get("running", 0) + stats.get("filling", 0), **label
    )
    count("vllm:num_requests_waiting", "waiting")
    if stats.get("pages"):
        used = stats["pages"] - stats["free_pages"]
        text.add("vllm:kv_cache_usage_perc", used / stats["pages"], **label)
    count(
        "vllm:prompt_tokens_total",
        "prefill_tokens",
        *(["append_tokens"] * ("append_tokens" in stats)),
    )
    count("vllm:generation_tokens_total", "decode_tokens")
    count("vllm:num_preemptions_total", "preempted")
    count("rl_jax:queue_rejects_total", "refused")
    count("rl_jax:aborts_total", "finish_abort")
    count("rl_jax:turn_errors_total", "failed")
    count("rl_jax:blocks_total", "blocks")
    count("rl_jax:swaps_total", "swaps")
    for name in sorted(name for name in stats if name.startswith("finish_")):
        reason = {"finished_reason": name.removeprefix("finish_")}
        text.add("vllm:request_success_total", stats[name], **label, **reason)
    text.add("rl_jax:weight_version", server.version, **label)


def tell_fleet(text: Text, servers: Iterable[Any]) -> None:
    """The state of each server, wherever it runs."""
    for server in servers:
        now = fleet_state(server)
        for state in FLEET_STATES:
            text.add("rl_jax:fleet_state", float(state == now), server=server.name, state=state)


def fleet_state(server: Any) -> str:
    if getattr(server, "gone", None):
        return "gone"
    if server.progress().is_compiling:
        return "starting"
    if server.fenced is not None:
        return "fenced"
    return "suspect" if getattr(server, "suspect", None) else "live"


def names_of(text: str) -> Iterator[str]:
    """Families of an exposition, as its TYPE lines say."""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            yield line.split()[2]


def is_label(name: str) -> bool:
    return _LABEL.fullmatch(name) is not None
