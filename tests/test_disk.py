"""disk.py: a file of lines whose writer died goes on with its next line whole, whoever owns it."""

import ast
import json
from pathlib import Path

import pytest

from rl_jax import disk
from rl_jax.disk import cut_torn_line, open_lines
from rl_jax.ledger import EpisodeRef, Ledger
from rl_jax.metrics import MetricsWriter, read_metrics
from rl_jax.run_dir import RunDir
from rl_jax.settings import Settings

TORN = b'{"step": 2, "reward/me'


@pytest.mark.parametrize("tail_bytes", [1, 3, 1 << 16])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"torn", b""),
        (b"one\n", b"one\n"),
        (b"one\ntwo\nto", b"one\ntwo\n"),
        (b"one\n\n", b"one\n\n"),
        ("one\ntorn in a 漢".encode()[:-1], b"one\n"),
    ],
)
def test_only_what_follows_the_last_newline_is_cut(
    tmp_path, monkeypatch, before, after, tail_bytes
):
    monkeypatch.setattr(disk, "TAIL_BYTES", tail_bytes)
    path = tmp_path / "lines"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after
    with open_lines(path) as file:
        file.write("next\n")
    assert path.read_bytes() == after + b"next\n"


def test_a_file_that_is_not_there_is_begun(tmp_path):
    cut_torn_line(tmp_path / "lines")
    assert not (tmp_path / "lines").exists()
    open_lines(tmp_path / "lines").close()
    assert (tmp_path / "lines").read_bytes() == b""


def _write_metrics(path: Path, step: int) -> Path:
    writer = MetricsWriter(path, attempt=step)
    writer.write(step, {"reward/mean": 0.5})
    writer.close()
    return path / "metrics.jsonl"


def _write_event(path: Path, step: int) -> Path:
    (path / "checkpoints" / "step_1").mkdir(parents=True, exist_ok=True)
    run = RunDir.open(path, Settings())
    run.event("alarm", step=step)
    run.close()
    return path / "events.jsonl"


def _write_ledger(path: Path, step: int) -> Path:
    ledger = Ledger(path / "ledger.jsonl", "r")
    ledger.write(EpisodeRef(f"r/0/{step}/0", 0, f"r/0/{step}", 0, step, 0, "t"), "ISSUED")
    ledger.close()
    return path / "ledger.jsonl"


@pytest.mark.parametrize("write", [_write_metrics, _write_event, _write_ledger])
def test_every_jsonl_file_of_a_run_survives_a_kill_in_its_last_line(tmp_path, write, caplog):
    if write is _write_event:
        RunDir.open(tmp_path / "r", Settings()).close()
    else:
        (tmp_path / "r").mkdir()
    path = write(tmp_path / "r", 1)
    path.write_bytes(path.read_bytes() + TORN)
    write(tmp_path / "r", 2)
    assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == 2
    assert f"{path}: cut a torn last line of {len(TORN)} bytes" in caplog.text


def test_rows_on_both_sides_of_a_kill_are_read(tmp_path):
    path = _write_metrics(tmp_path, 1)
    path.write_bytes(path.read_bytes() + TORN)
    _write_metrics(tmp_path, 2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.slow
def test_no_other_text_file_is_opened_to_append():
    allowed = {("disk.py", "a"), ("run_dir.py", "a+")}  # open_lines itself; the lock
    found = set()
    for path in Path(disk.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "open":
                modes = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
                found |= {(path.name, mode) for mode in modes if "a" in str(mode)}
    assert found == allowed
