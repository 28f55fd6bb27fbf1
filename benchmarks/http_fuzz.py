"""How the HTTP interface takes what schemathesis makes of its own schema: valid bodies, invalid ones, NUL among them.

    python -m benchmarks.http_fuzz [--cases=10000] [--out=benchmarks/results/http_fuzz.json]

The server is the real one on a socket, round a DecodeServer with a FakeEngine, so that a case costs milliseconds. A
case fails by a 5xx, by no answer within 10 s, or by an answer that is neither 200 nor an error object. Every path of
/openapi.json gets its share; half of the cases hold to the schema, half do not.
"""

import argparse
import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis

TIMEOUT_S = 10.0
OUT = Path(__file__).parent / "results" / "http_fuzz.json"


def fuzz(url: str, cases: int, seed: int = 0) -> dict[str, Any]:
    """Counts of so many cases, spread over all paths, and every failure with its body."""
    warnings.filterwarnings("ignore", category=hypothesis.errors.NonInteractiveExampleWarning)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", wait_for_schema=TIMEOUT_S)
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [one for one in operations if one.method.upper() == "POST"]
    gets = [one for one in operations if one.method.upper() != "POST"]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    shares = [(one, mode, cases // (2 * len(posts)) + 1) for one in posts for mode in modes]
    shares += [(one, schemathesis.GenerationMode.POSITIVE, 1) for one in gets]
    told: dict[str, Any] = {
        "statuses": Counter(),
        "paths": Counter(),
        "with_nul": 0,
        "failures": [],
    }
    told["slowest_s"] = 0.0
    for operation, mode, num in shares:
        _run(operation, mode, num, seed, told)
    return {**told, "cases": told["paths"].total(), "statuses": dict(told["statuses"]),
            "paths": dict(told["paths"])}  # fmt: skip


def _run(operation: Any, mode: Any, num: int, seed: int, told: dict[str, Any]) -> None:
    strategy = operation.as_strategy(generation_mode=mode)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def one(case: Any) -> None:
        start = time.monotonic()
        body = repr(case.body)[:2000]
        try:
            answer = case.call(timeout=TIMEOUT_S)
        except Exception as error:  # a failure of the case, whatever it is
            told["failures"].append(
                (operation.path, f"{type(error).__name__}: {error}"[:300], body)
            )
            return
        told["slowest_s"] = max(told["slowest_s"], time.monotonic() - start)
        told["statuses"][str(answer.status_code)] += 1
        told["paths"][operation.path] += 1
        told["with_nul"] += "\\x00" in body
        kind = answer.headers.get("content-type", [""])[0]
        is_object = kind.startswith("application/json") and "error" in answer.json()
        if answer.status_code >= 500 or (answer.status_code >= 400 and not is_object):
            told["failures"].append((operation.path, answer.status_code, body))

    one()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    from rl_jax.backend import simulate_cpu_devices

    simulate_cpu_devices(1)
    from rl_jax.testing.http_world import close, make_world

    world = make_world()
    start = time.monotonic()
    figures = fuzz(world.url, args.cases)
    figures["seconds"] = round(time.monotonic() - start, 1)
    figures["left_behind"] = world.gauges()
    close(world)
    args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({k: v for k, v in figures.items() if k != "failures"}, indent=1))
    for failure in figures["failures"][:10]:
        print(failure)
    raise SystemExit(bool(figures["failures"]))


if __name__ == "__main__":
    main()
