"""`python -m rl_jax.tools.doctor [--json] [--all]`: whether this machine can run what is here, and what to do if not.

One line for each thing that is missing or wrong, with one remedy; --all shows what is well too. What is looked at and
how: facts.py, health.py. It changes nothing and takes a few seconds.
Exit codes: 0 no problem (features may be missing), 1 a run would fail.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from rl_jax.console import say
from rl_jax.tools.facts import Facts, gather
from rl_jax.tools.health import MISSING, OK, PROBLEM, Finding, examine


def main(argv: Sequence[str] | None = None, gather: Callable[[], Facts] = gather) -> int:
    """The exit code. gather: the facts to judge."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.tools.doctor", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    parser.add_argument("--all", action="store_true", help="what is well too")
    args = parser.parse_args(argv)
    start_s = time.monotonic()
    findings = examine(gather())
    seconds = round(time.monotonic() - start_s, 2)
    is_well = all(finding.state != PROBLEM for finding in findings)
    if args.json:
        said = {"ok": is_well, "seconds": seconds, "findings": [asdict(f) for f in findings]}
        say(json.dumps(said))
    else:
        for line in lines_of(findings, seconds, args.all):
            say(line)
    return 0 if is_well else 1


def lines_of(findings: Sequence[Finding], seconds: float, shows_all: bool) -> Iterator[str]:
    for finding in findings:
        if finding.state != OK or shows_all or finding.check in ("packages", "devices"):
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            yield f"{finding.state:8}{finding.check}: {finding.detail}{remedy}"
    num = {state: sum(f.state == state for f in findings) for state in (OK, MISSING, PROBLEM)}
    yield (
        f"{num[OK]} well, {num[MISSING]} missing, {num[PROBLEM]} problems ({seconds:g} s)"
        + ("" if num[PROBLEM] else "; python -m rl_jax.launch begins a run")
    )


if __name__ == "__main__":
    sys.exit(main())
