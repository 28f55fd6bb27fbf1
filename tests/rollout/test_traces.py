"""Traces on disk rebuild the very trajectories; the sha256 is the interface's."""

import hashlib
import json
import struct
from dataclasses import fields, replace

import numpy as np
import pytest

from rl_jax.rollout.traces import (
    decode_trajectory,
    encode_trajectory,
    read_groups,
    read_traces,
    trajectory_sha256,
    write_traces,
)
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.types import Failure, Outcome, Reward
from tests.rollout.doubles import TOKENIZER, echo_tasks, running


def assert_same(a, b):
    assert type(a) is type(b) or {type(a), type(b)} <= {dict}
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    elif hasattr(a, "__dataclass_fields__"):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Sampled groups with a version swap in the middle of turns."""
    count = [0]

    def swap(request, num_tokens):
        count[0] += 1
        sampler.publish(count[0] // 7)

    sampler = FakeSampler(on_block=swap, block=2)
    with running(
        tmp_path_factory.mktemp("w"), sampler=sampler, tasks={"echo": echo_tasks(turns=3)}
    ) as world:
        world.rollout.published(0)
        return world.step(1)


def test_written_traces_are_read_back_exactly(groups, tmp_path):
    write_traces(tmp_path / "train", [t for g in groups for t in g.trajectories], TOKENIZER.decode)
    again = read_groups(tmp_path / "train")
    assert_same(tuple(groups), tuple(again))
    for group, twin in zip(groups, again):
        for a, b in zip(group.trajectories, twin.trajectories):
            assert trajectory_sha256(a) == trajectory_sha256(b)
            assert any(len(turn.spans) > 1 for turn in a.turns)


def with_support(trajectory, size=4):
    """The trajectory as if each token had been sampled from one to `size` ids."""
    support = np.full((len(trajectory.tokens), size), -1, np.int32)
    for at in np.flatnonzero(trajectory.versions >= 0):
        support[at, : 1 + at % size] = (trajectory.tokens[at] + np.arange(1 + at % size)) % 256
    sampled = support[trajectory.versions >= 0]
    turns = []
    for turn in trajectory.turns:
        turns.append(replace(turn, support=sampled[: len(turn.tokens)]))
        sampled = sampled[len(turn.tokens) :]
    return replace(trajectory, turns=tuple(turns), support=support)


def test_sampled_support_is_read_back_exactly_and_is_part_of_the_digest(groups):
    plain = groups[0].trajectories[0]
    cut = with_support(plain)
    assert_same(decode_trajectory(encode_trajectory(cut, TOKENIZER.decode)), cut)
    assert trajectory_sha256(cut) != trajectory_sha256(plain)


def test_rare_fields_survive(groups):
    base = groups[0].trajectories[0]
    turn = base.turns[0]
    num = len(turn.tokens)
    other = replace(
        turn,
        sampled_logprobs=turn.logprobs,
        logprobs=np.linspace(-3, -1 / 3, num).astype(np.float32),
        routing=np.full((len(turn.prompt_tokens) + num, 2, 1), -1, np.int16),
    )
    odd = replace(
        base,
        turns=(other, *base.turns[1:]),
        outcome=Outcome.FAILED,
        failure=Failure("env", "env_died", "infra", 'a "quoted" line\n'),
        reward=Reward(None, {}, (None, 1.0), "schema", "v", "why"),
        turn_rewards=np.array([np.nan, 0.5, -0.0], np.float32),
        truncated_by="length",
        sample_starts=(0, 3),
        roles=("x", "o", "x"),
    )
    assert trajectory_sha256(odd) != trajectory_sha256(replace(odd, sample_starts=(0, 4)))
    assert_same(odd, decode_trajectory(encode_trajectory(odd, TOKENIZER.decode)))


def test_line_has_the_interface_s_form(groups):
    trajectory = groups[0].trajectories[0]
    line = encode_trajectory(trajectory, TOKENIZER.decode)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    record = json.loads(line)
    names = {field.name for field in fields(trajectory)}
    assert set(record) == names
    assert record["tokens"] == trajectory.tokens.tolist()
    versions = np.full(len(trajectory.tokens), -1)
    for start, end, version in record["versions"]:
        versions[start:end] = version
    assert np.array_equal(versions, trajectory.versions)
    assert [TOKENIZER.decode(t.tokens) for t in trajectory.turns] == [
        t["text"] for t in record["turns"]
    ]


def test_sha256_is_over_the_named_bytes(groups):
    t = groups[0].trajectories[0]
    data = b"".join(struct.pack("<i", x) for x in t.tokens.tolist())
    data += bytes(int(x) for x in t.loss_mask)
    data += b"".join(struct.pack("<f", x) for x in t.logprobs.tolist())
    data += b"".join(struct.pack("<i", x) for x in t.versions.tolist())
    data += struct.pack("<d", t.reward.value)
    assert trajectory_sha256(t) == hashlib.sha256(data).hexdigest()


def test_index_finds_each_line_and_appending_extends_it(groups, tmp_path):
    first, second = (list(g.trajectories) for g in groups)
    write_traces(tmp_path, first, TOKENIZER.decode, append=True)
    write_traces(tmp_path, second, TOKENIZER.decode, append=True)
    index = np.load(tmp_path / "index.npz", allow_pickle=False)
    data = (tmp_path / "traces.jsonl").read_bytes()
    everything = [*first, *second]
    for i, t in enumerate(everything):
        assert json.loads(data[index["offset"][i] :].split(b"\n")[0])["uid"] == t.uid
    dtypes = {k: str(index[k].dtype) for k in ("offset", "reward", "length", "tag", "outcome")}
    assert dtypes == {
        "offset": "int64",
        "reward": "float32",
        "length": "int32",
        "tag": "int16",
        "outcome": "int8",
    }
    assert index["length"].tolist() == [len(t.tokens) for t in everything]
    assert index["tags"].tolist() == ["echo"] and index["group"].tolist() == [0, 0, 1, 1]
    assert [t.uid for t in read_traces(tmp_path)] == [t.uid for t in everything]
    write_traces(tmp_path, second, TOKENIZER.decode)  # without append: replaced
    assert len(read_traces(tmp_path)) == 2


def test_incomplete_directory_is_named(tmp_path):
    (tmp_path / "traces.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match="index.npz is missing"):
        read_traces(tmp_path)


def test_advantages_lie_beside_the_traces_token_by_token(groups, tmp_path):
    own = [t for g in groups for t in g.trajectories]
    given = [np.where(t.loss_mask, i + 0.5, np.nan).astype(np.float32) for i, t in enumerate(own)]
    given[1] = np.zeros(0, np.float32)  # it took no row
    write_traces(tmp_path, own, TOKENIZER.decode, advantages=given)
    flat = np.load(tmp_path / "advantages.npy")
    lengths = np.load(tmp_path / "index.npz")["length"]
    assert flat.dtype == np.float32 and len(flat) == lengths.sum()
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    np.testing.assert_array_equal(parts[0], given[0])
    assert np.isnan(parts[1]).all()
    np.testing.assert_array_equal(parts[-1], given[-1])
    assert len(read_traces(tmp_path)) == len(own)  # who reads trajectories does without them
    write_traces(
        tmp_path, own[:1], TOKENIZER.decode
    )  # replaced by what has none: they would be of others
    assert not (tmp_path / "advantages.npy").exists()
