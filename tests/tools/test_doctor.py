"""The doctor: each check on a machine that is well and on one that is not, and this machine in a few seconds."""

import json
import tomllib
from dataclasses import replace

import pytest

from rl_jax.tools import doctor
from rl_jax.tools.facts import GB, PORTS, ROOT, Facts, gather, name_of
from rl_jax.tools.health import CHECKS, EXTRAS, MISSING, OK, PROBLEM, examine, fits

PROJECT = {
    "requires-python": ">=3.11,<3.14",
    "dependencies": ["jax>=0.10.2,<0.13", "flax>=0.12"],
    "optional-dependencies": {"rich": ["rich>=13"], "cuda": ["jax[cuda13]>=0.10.2"]},
}
GPU = {"kind": "NVIDIA H200", "platform": "gpu", "limit": 140 * GB}
CPU = {"kind": "cpu", "platform": "cpu", "limit": None}
WELL = Facts(
    project=PROJECT,
    versions={"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "flax": "0.12.12", "rich": "15.0"},
    devices={"jax": "0.12.0.1", "devices": [GPU, GPU]},
    gpus=("NVIDIA H200", "NVIDIA H200"),
    disk={"runs": ("/runs", 90 * GB, True), "compile cache": ("/cache", 90 * GB, True)},
    cache=(400, GB),
)

UNWELL = [
    ("python", {"python": "3.10.2"}, PROBLEM, "3.10.2 is outside >=3.11,<3.14"),
    ("packages", {"versions": {**WELL.versions, "jax": "0.9.9", "jaxlib": "0.9.8"}}, PROBLEM, "jax 0.9.9 is outside"),
    ("packages", {"versions": {**WELL.versions, "jaxlib": "0.11.0"}}, PROBLEM, "with jaxlib 0.11.0"),
    ("packages", {"versions": {"jax": "0.12.0"}}, PROBLEM, "flax is not installed"),
    ("devices", {"devices_error": "JAX does not start: no driver"}, PROBLEM, "no driver"),
    ("devices", {"devices": {"devices": [CPU]}}, PROBLEM, "JAX sees only 1 x cpu"),
    ("gpu users", {"gpu_users": ((77, 90_000),)}, PROBLEM, "process 77 90000 MiB"),
    ("memory", {"memory_bytes": GB}, PROBLEM, "1.0 GiB can be had"),
    ("memory", {"cores": 1}, MISSING, "take turns"),
    ("disk", {"disk": {"runs": ("/runs", 90 * GB, False)}}, PROBLEM, "is not writable"),
    ("disk", {"disk": {"compile cache": ("/c", GB // 4, True)}}, PROBLEM, "0.2 GiB free"),
    ("compile cache", {"cache": (90_000, 30 * GB)}, PROBLEM, "30.00 GiB"),
    ("compile cache", {"cache": (0, 0)}, MISSING, "empty"),
    ("shared memory", {"shm_bytes": 64 << 20}, MISSING, "0.06 GiB free"),
    ("shared memory", {"shm_bytes": None}, MISSING, "/dev/shm: none"),
    ("open files", {"open_files": (256, 4096)}, PROBLEM, "at most 256"),
    ("ports", {"ports_taken": (8080,)}, MISSING, "8080 is taken, the default of tools.reward_server"),
    ("ports", {"loopback_error": "Cannot assign"}, PROBLEM, "127.0.0.1 cannot be bound"),
    ("isolation", {"sandbox_error": "sandbox bubblewrap is missing; apt-get install it"}, MISSING, "refused"),
    ("clock", {"clock": "hpet"}, MISSING, "hpet"),
    ("clock", {"clock_step_s": 0.01}, PROBLEM, "coarser than a turn"),
    ("clock", {"clock_year": 1970}, PROBLEM, "the year is 1970"),
    ("extras", {"versions": {k: v for k, v in WELL.versions.items() if k != "rich"}}, MISSING,
     "rich (lacks rich), for --progress=rich"),
    ("extras", {"devices": {"devices": [CPU]}, "gpus": ()}, MISSING, "cuda (JAX sees none), for NVIDIA GPUs"),
]  # fmt: skip


def test_a_machine_that_is_well_has_nothing_to_tell():
    assert {finding.state for finding in examine(WELL)} == {OK}
    assert "2 x NVIDIA H200 (gpu), 140 GiB each" in [f.detail for f in examine(WELL)]


@pytest.mark.parametrize(("check", "changes", "state", "said"), UNWELL)
def test_what_is_not_well_is_told_once_with_one_remedy(check, changes, state, said):
    found = [f for f in examine(replace(WELL, **changes)) if f.state != OK and f.check == check]
    assert [f.state for f in found] == [state] and said in found[0].detail
    assert found[0].remedy and "\n" not in found[0].detail + found[0].remedy


def test_every_check_has_an_unhealthy_case():
    names = {finding.check for finding in examine(WELL)}
    assert {case[0] for case in UNWELL} == names and len(CHECKS) == len(names)


@pytest.mark.parametrize(
    ("version", "asked", "is_in"),
    [
        ("0.12.0.1", "jax>=0.10.2,<0.13", True), ("0.13.0", "jax>=0.10.2,<0.13", False),
        ("0.13.0rc1", "jax<0.13", False), ("2.0", "x>=2.0.0", True), ("1.9.9", "x>=2", False),
        ("3.1.6", "jinja2>=3.1.6", True), ("5", "x!=5.0", False), ("5.1", "x==5.1.0", True),
    ],
)  # fmt: skip
def test_versions_in_and_out_of_a_range(version, asked, is_in):
    assert fits(version, asked) is is_in


def test_every_extra_says_what_it_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"])
    assert name_of("jax[cuda13]>=0.10.2,<0.13") == "jax" and len(PORTS) == 3


def test_exit_codes_and_json(capsys):
    assert doctor.main([], lambda: WELL) == 0
    assert "0 problems" in capsys.readouterr().out
    assert doctor.main([], lambda: replace(WELL, cores=1)) == 0  # a feature less is no problem
    assert doctor.main(["--json"], lambda: replace(WELL, python="3.9.1")) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not said["ok"] and said["findings"][0]["state"] == PROBLEM


@pytest.mark.slow
def test_this_machine_is_looked_at_in_seconds(capsys):
    facts = gather()
    assert doctor.main(["--all", "--json"], lambda: facts) in (0, 1)
    said = json.loads(capsys.readouterr().out)
    states = {f["check"]: f["state"] for f in said["findings"] if f["check"] != "extras"}
    assert states["python"] == states["packages"] == states["devices"] == OK
    assert facts.devices["jax"] and facts.memory_bytes > 0 and facts.disk["runs"][1] > 0
