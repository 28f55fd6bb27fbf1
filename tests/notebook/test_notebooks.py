"""The notebooks of notebooks/, executed from a folder of their own as a reader would, by a kernel of this Python."""

import json
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 240  # of one cell; the longest takes seconds


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_valid_and_stored_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None and not cell.outputs for cell in cells)
    assert path.stat().st_size < 40_000 and notebook.cells[0].source.startswith("# ")


def execute(name, folder, monkeypatch, **values):
    """Its code cells, run in `folder`. values: of the names that a cell of the notebook sets, and says what for."""
    notebook = read(ROOT / "notebooks" / f"{name}.ipynb")
    for key, value in values.items():
        (cell,) = [c for c in notebook.cells if re.fullmatch(rf"{key} = \w+", c.source)]
        cell.source = f"{key} = {value}"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells, mime="text/plain"):
    """What each cell's value is shown as, and what was printed, in order."""
    out = []
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "stream":
                out += [output.text] * (mime == "text/plain")
            elif mime in output.get("data", {}):
                out.append(output.data[mime])
    return out


@pytest.mark.slow(seconds=20)
def test_quickstart(tmp_path, monkeypatch):
    cells = execute("quickstart", tmp_path, monkeypatch, SMALL=True)
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "STATUS.json").read_text())["state"] == "done"
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    text = "\n".join(shown(cells))
    assert re.search(r"^step 5/6 ", text, re.M) and re.search(r"^step 6/6 ", text, re.M)
    assert "warm_start.steps" in text and "train episode of step 5" in text
    assert len(shown(cells, "image/png")) == 1
    assert sum("<table" in page for page in shown(cells, "text/html")) >= 4


@pytest.mark.slow(seconds=15)
def test_your_own_environment(tmp_path, monkeypatch):
    cells = execute("your_own_environment", tmp_path, monkeypatch)
    text = "\n".join(shown(cells))
    assert "nothing wrong" in text
    found = re.search(r"mean reward (\S+) at step 1, (\S+) at step 24", text)
    assert float(found[1]) < 0.2 < 0.4 < float(found[2]), "it learns, as the notebook says"
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    written = (tmp_path / "vowels.py").read_text(encoding="utf-8")
    assert written.strip() in page, "the environment is the one of the page"


@pytest.mark.slow(seconds=15)
def test_inside_a_weight_sync(tmp_path, monkeypatch):
    text = "\n".join(shown(execute("inside_a_weight_sync", tmp_path, monkeypatch)))
    assert "ABORTED" in text and "digest differs for parameter layers.0.mlp.up" in text
    assert "version 2 served: 2 fenced: {}" in text


class Kernel:
    """One that runs, as Jupyter drives it."""

    def __init__(self, folder):
        self.manager, self.client = start_new_kernel(cwd=str(folder))

    def run(self, text, interrupt_at=""):
        """(what was printed, the error that ended the cell). interrupt_at: what is printed when it is interrupted."""
        said, error, left = "", "", interrupt_at
        self.client.execute(text)
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            kind, content = message["msg_type"], message["content"]
            said += content["text"] if kind == "stream" else ""
            if left and left in said:
                self.manager.interrupt_kernel()
                left = ""
            if kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            if kind == "status" and content["execution_state"] == "idle":
                return said, error


@pytest.mark.slow(seconds=8)
def test_an_interrupt_of_the_kernel_is_heard_between_steps_and_its_handlers_are_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kernel, config = Kernel(tmp_path), str(ROOT / "tests" / "job_config.py")
    handlers = "(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))"
    try:
        begin = f"import rl_jax, signal; run = rl_jax.run({config!r}, steps=400, **plain)"
        _, error = kernel.run("plain = {'changes': {'metrics.progress': 'plain'}}; " + begin)
        assert not error
        said, error = kernel.run(f"before = {handlers}; run.step(400)", "step   3/400")
        assert error.startswith("KeyboardInterrupt: stopped") and "the next call goes on" in error
        said, error = kernel.run(f"print(before == {handlers}, run.version < 400)")
        assert said == "True True\n"
        said, error = kernel.run("was = run.version; run.step(2); print(run.version - was)")
        assert said.endswith("2\n") and not error
        said, error = kernel.run("run.close(); print(run.status['state'])")
        assert said.endswith("interrupted\n") and not error
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)
