"""Checkpoints: what is restored equals what was saved, onto any mesh; what is damaged is never used."""

import json
import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.checkpoint import Checkpointer, CheckpointError
from rl_jax.mesh import make_mesh
from rl_jax.settings import CheckpointSettings

EXTRA = {"stream": {"order": [3, 1]}, "ledger_seq": 17, "pending": [[0, 4]]}


class Moments(NamedTuple):
    count: jax.Array
    mu: dict


def make_state(seed: int, devices, axes):
    """A pytree with dicts, tuples and a NamedTuple, as optax makes them; f32, bf16 and i32 leaves."""
    mesh = make_mesh(axes, devices)
    rng = np.random.default_rng(seed)

    def put(x, *spec):
        return jax.device_put(jnp.array(x), NamedSharding(mesh, PartitionSpec(*spec)))

    weights = {
        "layers.0.up": rng.normal(size=(16, 8)).astype(np.float32),
        "norm": np.ones(8, np.float32),
    }
    params = {"layers.0.up": put(weights["layers.0.up"], "fsdp"), "norm": put(weights["norm"])}
    mu = {n: put(x.astype(jnp.bfloat16)) for n, x in weights.items()}
    return {
        "params": params,
        "opt_state": (Moments(put(np.int32(seed)), mu), ()),
        "step": put(np.int32(seed)),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def same(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with steps 1 and 2, and their states."""
    run = tmp_path_factory.mktemp("run")
    states = {step: make_state(step, jax.devices()[:2], {"fsdp": 2}) for step in (1, 2)}
    checkpointer = Checkpointer(run, CheckpointSettings(), config_hash="abc")
    for step, state in states.items():
        checkpointer.save(step, state, {**EXTRA, "step": step})
    checkpointer.wait()
    return run, states


@pytest.fixture
def run(saved, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def data_files(run, step):
    """The files that hold array bytes, the largest first, no two alike."""
    root = run / "checkpoints" / f"step_{step}" / "state"
    unlike = {p.read_bytes(): p for p in root.rglob("d/*") if p.is_file()}
    return [unlike[data] for data in sorted(unlike, key=len, reverse=True)]


def test_restored_state_equals_the_saved_one_with_its_extra(saved):
    run, states = saved
    checkpointer = Checkpointer(run, CheckpointSettings())
    assert checkpointer.latest() == 2
    for step, state in states.items():
        restored, extra = checkpointer.restore(step, abstract(state))
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert same(restored, state)
        assert extra == {**EXTRA, "step": step}


def test_a_restore_whole_or_in_part_has_nothing_to_warn_of(saved, caplog):
    caplog.set_level(logging.INFO)
    run, states = saved
    checkpointer = Checkpointer(run, CheckpointSettings())
    assert same(checkpointer.restore(2, abstract(states[2]))[0], states[2])
    params = {"params": states[2]["params"]}
    assert same(checkpointer.restore(2, abstract(params), subset=True)[0], params)
    assert "WARNING" not in caplog.text


def test_restores_onto_another_mesh(saved):
    run, states = saved
    other = abstract(make_state(0, jax.devices()[4:8], {"fsdp": 4}))
    restored, _ = Checkpointer(run, CheckpointSettings()).restore(2, other)
    assert same(restored, states[2])
    for x, want in zip(jax.tree.leaves(restored), jax.tree.leaves(other), strict=True):
        assert x.sharding == want.sharding
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    assert int(step(restored)["step"]) == 3  # and may be donated


def test_manifest_says_what_the_bundle_is(saved):
    manifest = Checkpointer(saved[0], CheckpointSettings()).manifest(2)
    assert (manifest["step"], manifest["version"], manifest["config_hash"]) == (2, 2, "abc")
    assert manifest["libraries"]["jax"] == jax.__version__
    assert manifest["leaves"]["params/layers.0.up"] == ["float32", [16, 8]]
    assert manifest["leaves"]["opt_state/0/mu/norm"] == ["bfloat16", [8]]
    assert all(len(f["sha256"]) == 64 for f in manifest["files"].values())


def test_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    checkpointer = Checkpointer(tmp_path, CheckpointSettings())
    state = make_state(5, jax.devices()[:2], {"fsdp": 2})
    want = jax.tree.map(np.array, state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    checkpointer.save(5, state, {})
    jax.block_until_ready(step(state))
    restored, _ = checkpointer.restore(5, abstract(make_state(0, jax.devices()[:2], {"fsdp": 2})))
    assert same(restored, want)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "flipped bit": flip,
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "emptied": lambda p: p.write_bytes(b""),
    "deleted": lambda p: p.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_quarantined_and_the_step_before_is_used(run, caplog, damage):
    DAMAGE[damage](data_files(run, 2)[0])
    checkpointer = Checkpointer(run, CheckpointSettings())
    with caplog.at_level(logging.ERROR):
        assert checkpointer.latest() == 1
    assert "CHECKPOINT step_2 IS CORRUPT" in caplog.text
    assert (run / "checkpoints" / "quarantine" / "step_2" / "MANIFEST.json").exists()
    assert not (run / "checkpoints" / "step_2").exists()


def test_every_file_is_covered_and_the_manifest_covers_itself(run):
    root = run / "checkpoints" / "step_2"
    files = [p for p in root.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) > 5
    for path in files:
        good = path.read_bytes()
        flip(path)
        with pytest.raises(CheckpointError, match="cannot be used"):
            Checkpointer(run, CheckpointSettings()).restore(2, {})
        path.write_bytes(good)
    manifest = json.loads((root / "MANIFEST.json").read_text())
    manifest["extra"]["ledger_seq"] = 18
    (root / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not match its own sha256"):
        Checkpointer(run, CheckpointSettings()).restore(2, {})


def test_swapped_files_and_a_renamed_step_are_found(run):
    first, second = data_files(run, 2)[:2]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    (run / "checkpoints" / "step_1").rename(run / "checkpoints" / "step_9")
    assert Checkpointer(run, CheckpointSettings()).latest() is None
    assert sorted(p.name for p in (run / "checkpoints" / "quarantine").iterdir()) == [
        "step_2",
        "step_9",
    ]


def test_all_damaged_or_none_is_none(tmp_path):
    assert Checkpointer(tmp_path, CheckpointSettings()).latest() is None


def test_state_of_other_settings_is_refused_by_leaf(saved):
    run, states = saved
    other = abstract(states[2])
    other["params"]["norm"] = jax.ShapeDtypeStruct((9,), jnp.float32)
    with pytest.raises(
        CheckpointError, match=r"first params/norm: saved \['float32', \[8\]\], wanted"
    ):
        Checkpointer(run, CheckpointSettings()).restore(2, other)
    del other["params"]["norm"]
    with pytest.raises(CheckpointError, match="1 of 5 leaves differ.*wanted nothing"):
        Checkpointer(run, CheckpointSettings()).restore(2, other)


def test_only_the_newest_are_kept_and_a_saved_step_is_replaced(run):
    checkpointer = Checkpointer(run, CheckpointSettings(keep=2))
    state = make_state(3, jax.devices()[:2], {"fsdp": 2})
    checkpointer.save(3, state, {"try": 1})
    checkpointer.save(3, state, {"try": 2})
    checkpointer.wait()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_2", "step_3"]
    assert checkpointer.restore(3, abstract(state))[1] == {"try": 2}


def test_what_a_killed_save_left_is_swept_and_a_complete_bundle_gets_its_name(run):
    root = run / "checkpoints"
    (root / "step_2").rename(root / ".tmp_step_2")  # killed before the rename
    shutil.copytree(root / "step_1", root / ".tmp_step_3")  # killed while writing: not what it says
    shutil.copytree(root / "step_1", root / ".trash_step_0")  # killed while deleting
    checkpointer = Checkpointer(run, CheckpointSettings())
    assert len(list(root.iterdir())) == 4  # a mere reader touches nothing
    assert checkpointer.latest() == 2
    assert sorted(p.name for p in root.iterdir()) == ["step_1", "step_2"]


def test_extra_that_is_not_json_is_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="extra of step 1 is not JSON"):
        Checkpointer(tmp_path, CheckpointSettings()).save(1, {}, {"x": float("nan")})


def test_failed_save_names_the_directory_and_older_steps_stay(run):
    checkpointer = Checkpointer(run, CheckpointSettings())
    root = run / "checkpoints"
    checkpointer.latest()
    (root / ".tmp_step_3").write_text("in the way")
    with pytest.raises(CheckpointError, match="step 3 was not saved into .*older steps are whole"):
        checkpointer.save(3, make_state(3, jax.devices()[:2], {"fsdp": 2}), {})
    assert checkpointer.latest() == 2


def test_what_orbax_says_of_a_failed_save_is_in_the_log_file_and_not_in_the_terminal(run, caplog):
    caplog.set_level(logging.INFO)
    checkpointer = Checkpointer(run, CheckpointSettings())
    checkpointer.save(3, make_state(3, jax.devices()[:2], {"fsdp": 2}), {})
    checkpointer.wait()
    absl = logging.getLogger("absl")
    place = Path(ocp.__file__)
    for path, said in ((place, "a commit failed"), (Path(__file__), "of somebody else")):
        absl.handle(absl.makeRecord("absl", logging.ERROR, str(path), 1, said, (), None))
    found = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    assert ("rl_jax.checkpoint", "INFO", "orbax ERROR: a commit failed") in found
    assert [f for f in found if f[1] != "INFO"] == [("absl", "ERROR", "of somebody else")]
