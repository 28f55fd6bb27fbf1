"""Batches, metrics and pieces of parameters come over as they were sent."""

from dataclasses import fields

import jax
import numpy as np
import pytest

from rl_jax.learner.batch import Batch, empty_batch
from rl_jax.mesh import make_mesh
from rl_jax.metrics import Metric
from rl_jax.remote.framing import encode_json
from rl_jax.remote.learner_wire import (
    batch_from_wire,
    batch_to_wire,
    metrics_from_wire,
    metrics_to_wire,
    pieces_to_wire,
    whole_from_wire,
)
from rl_jax.settings import LearnerSettings


def test_batch_comes_over_whole():
    rng = np.random.default_rng(0)
    plain = empty_batch(LearnerSettings(row_tokens=8), ())
    arrays = {
        f.name: rng.integers(0, 2, (3, 8)).astype(getattr(plain, f.name).dtype)
        for f in fields(Batch)
        if f.name not in ("extras", "support")
    }
    extras = {"values": rng.standard_normal((3, 8)).astype(np.float32)}
    for support in (None, rng.integers(0, 9, (3, 8, 4)).astype(np.int32)):
        batch = Batch(**arrays, extras=extras, support=support)
        body, sent = batch_to_wire(batch)
        encode_json(body)
        got = batch_from_wire(body, sent)
        for f in fields(Batch):
            if f.name != "extras":
                np.testing.assert_array_equal(getattr(got, f.name), getattr(batch, f.name))
        assert list(got.extras) == ["values"]
        np.testing.assert_array_equal(got.extras["values"], extras["values"])
    with pytest.raises(ValueError, match="arrays came for a batch of"):
        batch_from_wire(body, sent[1:])


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {
            "a": Metric(1.5, 2.0),
            "b": Metric(0.0, 3.0, 0.0, 0.0),
            "c": Metric(-1.0, 1.0, -1.0, None),
        },
    ],
)
def test_metrics_come_over_with_what_was_not_recorded(metrics):
    assert metrics_from_wire(*metrics_to_wire(metrics)) == metrics


def test_metric_that_is_not_finite_stays_so():
    got = metrics_from_wire(
        *metrics_to_wire({"loss": Metric(float("nan"), 1.0, None, float("inf"))})
    )
    assert np.isnan(got["loss"].sum) and got["loss"].max == float("inf") and got["loss"].min is None


def test_pieces_of_sharded_and_replicated_arrays_make_the_wholes():
    mesh = make_mesh({"fsdp": 4}, jax.devices()[:4])
    place = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    wholes = [np.arange(24, dtype=np.float32).reshape(8, 3), np.float32(7.0), np.arange(4) + 1.5]
    specs = [place("fsdp"), place(), place()]
    arrays = [jax.device_put(x, s) for x, s in zip(wholes, specs, strict=True)]
    places, pieces = pieces_to_wire(arrays)
    assert len(pieces) == 4 + 1 + 1  # a replica is sent once
    shapes, dtypes = [a.shape for a in arrays], [a.dtype for a in arrays]
    cut = 3  # as two processes would send them
    sent = [(places[:cut], pieces[:cut]), (places[cut:], pieces[cut:])]
    for got, array in zip(whole_from_wire(shapes, dtypes, sent), arrays, strict=True):
        np.testing.assert_array_equal(got, np.asarray(array))
    with pytest.raises(ValueError, match="18 of 24 elements of array 0"):
        whole_from_wire(shapes, dtypes, [(places[1:], pieces[1:])])
