"""`python -m rl_jax.launch` as a person types it: exit codes, one line an error, nothing left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_jax import launch, outset
from rl_jax.config import parse
from rl_jax.rollout.worker import EnvPool
from rl_jax.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]


def launched(*words, cwd=ROOT, timeout=120, env=None):
    """Run the command in a process of its own."""
    env = env or {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "rl_jax.launch", *words],
        capture_output=True, text=True, cwd=cwd, timeout=timeout, env=env,
    )  # fmt: skip


@pytest.mark.slow
def test_imports_that_patch_the_importer_are_done_before_a_server_compiles(tmp_path):
    """A thread that imports while they load gets lazy modules: a server died of it while it compiled."""
    script = (
        "import sys; from rl_jax import launch; from rl_jax.cluster import InProcCluster\n"
        "def start(self): print('seen', sorted({'grain', 'orbax.checkpoint'} & set(sys.modules))); sys.exit(9)\n"
        "InProcCluster.start = start\n"
        f"launch.main(['--config={ROOT / 'tests/job_config.py'}', '--run_dir={tmp_path / 'r'}'])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 9 and "seen ['grain', 'orbax.checkpoint']" in done.stdout, done.stderr


def test_bad_words_exit_2_with_one_line_each_and_no_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = launch.main(
        ["--config.learner.learning_rat=1", "steps=3", "--config.rollout.batch_groups=7"]
    )
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_error_answers_within_seconds_and_without_a_trace(tmp_path):
    start = time.monotonic()
    done = launched("--mesh=split_8", "--config.mesh.pools[2].devices=3", cwd=tmp_path)
    assert time.monotonic() - start < 10.0, "about 1 s on an idle machine"
    assert done.returncode == 2
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert "error: mesh pool train" in done.stderr and "it has 3" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_platform_of_the_environment_is_not_overridden(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert launch.main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "mesh.platform=cpu contradicts JAX_PLATFORMS=cuda,cpu: unset JAX_PLATFORMS" in lines[0]
    assert os.environ["JAX_PLATFORMS"] == "cuda,cpu" and list(tmp_path.iterdir()) == []


def test_mesh_for_simulated_devices_asks_for_the_cpu(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert parse([]).settings.mesh.platform == "cpu"
    outset.set_backend(parse([]).settings)
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    for words in (["--mesh=one_device"], ["--config.mesh.platform="]):
        settings = parse(words).settings
        outset.set_backend(settings)
        assert (settings.mesh.platform, os.environ["JAX_PLATFORMS"]) == ("", "cuda")


@pytest.mark.slow  # a process that imports jax
def test_mesh_that_does_not_fit_the_devices_is_one_line_and_no_directory(tmp_path):
    done = launched(
        f"--config={ROOT / 'tests' / 'job_config.py'}", "--mesh=tpu_v5e_16",
        "--config.learner.microbatch_rows=8", f"--run_dir={tmp_path / 'r'}",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        "error: mesh tpu_v5e_16 needs 16 devices but JAX finds 8 (cpu); use a mesh that fits, such as"
        " --mesh=one_device, or simulate the devices on the CPU with --config.mesh.platform=cpu"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_backend_that_is_not_there_is_one_line_and_no_directory(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "no_such_chip"}
    done = launched(
        f"--config={ROOT / 'tests' / 'job_config.py'}", f"--run_dir={tmp_path / 'r'}", env=env
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: JAX finds no device: ") and "no_such_chip" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_reader_that_leaves_early_sees_no_trace():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m rl_jax.launch --help | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_help_exits_0(capsys):
    with pytest.raises(SystemExit) as caught:
        launch.main(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m rl_jax.launch")


@pytest.mark.slow  # a process that imports jax and the environments
def test_dry_run_shows_the_plan_and_starts_nothing(tmp_path):
    done = launched("--dry_run", f"--run_dir={tmp_path / 'r'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "decode.0" in done.stdout and "prefill.0" in done.stdout
    assert "algorithm dr_grpo: clip_low=0.2, clip_high=0.28" in done.stdout  # its own, resolved
    assert [p.name for p in tmp_path.rglob("*")] == ["r", "plan.json"]
    assert json.loads((tmp_path / "r" / "plan.json").read_text())["mesh"] == "split_8"


@pytest.mark.slow
def test_environment_that_cannot_be_imported_is_told_with_its_own_error(tmp_path):
    (tmp_path / "broken_env.py").write_text("import a_library_that_is_not_here\n")
    start = time.monotonic()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [
            sys.executable, "-m", "rl_jax.launch", f"--run_dir={tmp_path / 'r'}",
            "--config.tasks.sources[0].env=broken_env:Env",
        ],
        capture_output=True, text=True, cwd=ROOT, timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert (
        "a_library_that_is_not_here" in done.stderr
        and "Traceback (most recent call last)" not in done.stderr
    )
    assert not (tmp_path / "r").exists()
    assert time.monotonic() - start < 60.0


@pytest.mark.slow
def test_plan_for_more_devices_than_the_machine_has_can_be_checked_on_it(tmp_path):
    """On simulated CPU devices, whatever backend the user's own variable names."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "no_such_chip"}
    words = ["--mesh=tpu_v5e_16", "--config.learner.microbatch_rows=8"]
    config = f"--config={ROOT / 'tests' / 'job_config.py'}"
    done = launched("--dry_run", config, *words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "can be traced for 16 devices, here simulated on the CPU" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_directory_that_is_held_or_cannot_be_written_is_told_before_anything_starts(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(EnvPool, "spawn", lambda pool: pytest.fail("environments were started"))
    config = f"--config={ROOT / 'tests' / 'job_config.py'}"
    run = RunDir.open(tmp_path / "r", parse([config]).settings)
    assert launch.main([config, f"--run_dir={run.path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run.path} is in use by pid {os.getpid()} on ")
    run.close()
    assert launch.main([config, "--run_dir=/dev/null/r"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: cannot write the run directory /dev/null/r: /dev/null is no directory"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")  # where a directory without a name would go
    assert launch.main([config]) == 2
    assert "cannot write the run directory runs: " in capsys.readouterr().err


@pytest.mark.slow
def test_directory_of_another_run_is_refused(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("")
    done = launched(f"--run_dir={tmp_path / 'r'}", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "holds thesis.tex but no run" in done.stderr
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["thesis.tex"]
