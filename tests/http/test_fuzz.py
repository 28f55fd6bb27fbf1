"""Schemathesis against the public plane: whatever comes, an answer below 500, in time.

`make fuzz` runs 10,000 cases and writes benchmarks/results/http_fuzz.json; here are 500.
"""

import pytest

schemathesis = pytest.importorskip("schemathesis")

from benchmarks.http_fuzz import fuzz  # noqa: E402


@pytest.mark.slow(seconds=15)
def test_500_cases_bring_no_5xx_and_no_hang(world):
    figures = fuzz(world.url, 500, seed=1)
    assert figures["cases"] >= 500 and figures["failures"] == []
    assert figures["statuses"].get("200", 0) > 20 and figures["statuses"].get("400", 0) > 20
    assert figures["with_nul"] > 0 and figures["slowest_s"] < 5
