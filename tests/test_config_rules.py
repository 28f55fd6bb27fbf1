"""validate.py: every setting has a rule, and the packages come from one checkout."""

from pathlib import Path

from rl_jax import schema
from rl_jax.settings import Settings
from rl_jax.validate import CHOICES, INTERVALS, NAMES, foreign_packages

ROOT = Path(__file__).resolve().parents[1]


def test_every_setting_has_a_rule():
    """A number has an interval, a word a choice or a table; the rest is listed here with the reason."""
    elsewhere = {
        "run_id",  # a pattern
        "model.source",  # a directory
        "model.tokenizer",  # a name or a directory
        "engine.chunk_sizes",  # ascending
        "rollout.replay_dir",  # by mode
        "data.path",
        "data.eval_path",  # files, by algorithm and mode
        "cluster.address",
        "cluster.host",  # by backend
        "mesh.name",  # free
        "rollout.tool_parser",  # a table, or auto
        "reference.checkpoint",
        "reference.pool",
        "teacher.checkpoint",
        "teacher.pool",
        "reward_model.checkpoint",
        "reward_model.pool",
        "critic.pool",  # role_source.py
        "algorithm.reward_weights",  # rules.py
        "algorithm.episode_roles",  # names of an environment
        "algorithm.normalize",  # true, false or the algorithm's own
        "algorithm.bootstrap",
    }
    keys = {
        k
        for k in schema.leaf_keys()
        if not k.startswith(("mesh.pools", "mesh.rules", "tasks.sources"))
    }
    booleans = {k for k in keys if isinstance(schema.leaves(schema.to_tree(Settings()))[k], bool)}
    assert keys - booleans - set(INTERVALS) - set(CHOICES) - set(NAMES) - elsewhere == set()
    assert {*INTERVALS, *CHOICES, *NAMES} <= keys


def test_foreign_package_of_the_same_name_is_told_with_both_paths(tmp_path, monkeypatch):
    assert foreign_packages(ROOT) == []
    for name in ("rl_jax", "kernels", "envs", "mesh_configs"):
        (tmp_path / name).mkdir()
    errors = foreign_packages(tmp_path)
    assert len(errors) == 4
    assert f"package envs comes from {ROOT / 'envs'}, not from {tmp_path / 'envs'}" in errors[2]
