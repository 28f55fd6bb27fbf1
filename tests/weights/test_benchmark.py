"""The weight-sync benchmark runs on simulated devices: exact in every way it times, with a whole report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow(seconds=20)
def test_weight_sync_benchmark_runs_tiny(tmp_path):
    out = tmp_path / "weight_sync.json"
    command = [sys.executable, "benchmarks/weight_sync.py", "--tiny", "--out", str(out)]
    command += ["--only", "copy", "publish", "unequal"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert {"card", "date", "versions", "command", "rows"} <= set(report)
    names = {row["name"] for row in report["rows"]}
    assert {"same layout", "device_put across layouts", "packed, 512 KiB", "2 to 1"} <= names
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 to 1, device_put across layouts")
