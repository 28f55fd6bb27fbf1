"""validate.py: every setting has a rule, policies that need more than one value say so, and the packages come from one
checkout."""

from dataclasses import replace
from pathlib import Path

import pytest

from rl_jax import schema
from rl_jax.config import ConfigError, parse
from rl_jax.settings import MeshSettings, PoolSettings, Settings, TaskSettings, TaskSource
from rl_jax.validate import CHOICES, INTERVALS, NAMES, _affinity_errors, check, foreign_packages

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
        "cluster.env_hardware",
        "cluster.scorer_hardware",  # names of a Ray cluster's own
        "mesh.name",  # free
        "metrics.trackers",
        "metrics.tracker_options",
        "metrics.host",
        "metrics.token_file",  # validate_watch.py
        "rollout.tool_parser",  # a table, or auto
        "reference.checkpoint",
        "reference.pool",
        "teacher.checkpoint",
        "teacher.pool",
        "reward_model.checkpoint",
        "reward_model.pool",
        "critic.pool",  # role_source.py
        "rewards.url",
        "rewards.token_file",
        "rewards.options",  # validate_rewards.py
        "algorithm.reward_weights",  # rules.py
        "algorithm.episode_roles",  # names of an environment
        "algorithm.normalize",  # true, false or the algorithm's own
        "algorithm.bootstrap",
        "metrics.profile_steps",  # a range
    }
    keys = {
        k
        for k in schema.leaf_keys()
        if not k.startswith(("mesh.pools", "mesh.rules", "tasks.sources"))
    }
    booleans = {k for k in keys if isinstance(schema.leaves(schema.to_tree(Settings()))[k], bool)}
    assert keys - booleans - set(INTERVALS) - set(CHOICES) - set(NAMES) - elsewhere == set()
    assert {*INTERVALS, *CHOICES, *NAMES} <= keys


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--config.serve.affinity=auto", "--mesh=split_8"],
            "serve.affinity=auto has nothing to choose on mesh split_8, whose decode pools all have hardware cpu; give",
        ),
        (
            ["--config.rollout.staleness_policy=adaptive"],
            "rollout.staleness_policy=adaptive chooses 1 to rollout.max_staleness=1, which leaves no choice; use",
        ),
    ],
)
def test_policy_that_has_nothing_to_choose_is_refused_in_one_line(words, line):
    with pytest.raises(ConfigError) as caught:
        parse(words)
    (error,) = caught.value.errors
    assert error.startswith(line)


def test_pools_that_declare_tags_are_refused_where_they_are_assigned():
    pools = [
        PoolSettings(name, "decode", hardware=name, tags=tags)
        for name, tags in (("H800", ("lake",)), ("H20", ()))
    ]
    (error,) = _affinity_errors(MeshSettings("mixed", tuple(pools)))
    assert error.startswith(
        "serve.affinity=auto assigns tags itself, but mesh mixed declares some for H800"
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"extra_groups": 3}, "rollout.extra_groups=3 does not divide into 2 tags"),
        ({"extra_groups": -2}, "rollout.extra_groups=-2 must be at least 0"),
        ({"extra_members": -1}, "rollout.extra_members=-1 must be at least 0"),
        ({"env_stepping": "turn"}, "env_stepping=turn is not one of trajectory, batch"),
        ({"extra_groups": 2, "extra_members": 3, "env_stepping": "batch"}, None),
    ],
)
def test_what_runs_beyond_the_needed_and_when(settings, line):
    tasks = TaskSettings(sources=(TaskSource(), TaskSource(tag="other")))
    base = Settings(tasks=tasks)
    before = check(base)
    errors = check(replace(base, rollout=replace(base.rollout, **settings)))
    more = [error for error in errors if error not in before]
    assert len(more) == (line is not None) and (line is None or line in more[0])


def test_foreign_package_of_the_same_name_is_told_with_both_paths(tmp_path, monkeypatch):
    assert foreign_packages(ROOT) == []
    for name in ("rl_jax", "kernels", "envs", "mesh_configs"):
        (tmp_path / name).mkdir()
    errors = foreign_packages(tmp_path)
    assert len(errors) == 4
    assert f"package envs comes from {ROOT / 'envs'}, not from {tmp_path / 'envs'}" in errors[2]


@pytest.mark.parametrize(
    ("backend", "transport", "stores", "line"),
    [
        ("local", "reshard", 0, "weights.transport=reshard is to servers of the driver's process, and"),
        ("external", "store", 0, "weights.transport=store needs a store; set cluster.stores to the number"),
        ("ray", "store", 0, "weights.transport=store needs a store; set cluster.stores to the number"),
        ("ray", "auto", 1, None),
        ("local", "shared", 1, "cluster.stores=1 is not used by weights.transport=shared; leave it 0, or use"),
        ("external", "transfer", 1, "cluster.stores=1 is not used by weights.transport=transfer; leave it 0, or"),
        ("inproc", "transfer", 0, "weights.transport=transfer is to servers of other processes, and cluster.backend=i"),
        ("local", "transfer", 0, None),
        ("ray", "transfer", 0, None),
        ("local", "auto", 2, "cluster.stores=2: backend local is one host, which needs one; use 1 or 0"),
        ("external", "store", 2, None),
        ("local", "auto", 1, None),
        ("ray", "shared", 0, None),
    ],
)  # fmt: skip
def test_transport_fits_where_servers_run(backend, transport, stores, line):
    words = [
        "--config.mesh.platform=cpu",
        f"--config.cluster.backend={backend}",
        f"--config.weights.transport={transport}",
        f"--config.cluster.stores={stores}",
    ]
    if line is None:
        assert parse(words).settings.cluster.stores == stores
        return
    with pytest.raises(ConfigError) as caught:
        parse(words)
    (error,) = caught.value.errors
    assert error.startswith(line)
