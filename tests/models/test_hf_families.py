"""Directories as transformers writes them, of every family: their config, their weights, and back."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from rl_jax.models import hf, hf_config
from rl_jax.models.hf_files import SINGLE
from rl_jax.settings import ModelSettings
from tests.models.families import FAMILIES, family, model_of, params_of
from tests.models.numpy_reader import NumpyModel


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture
def directory(name, tmp_path):
    (tmp_path / "config.json").write_text(family(name).config)
    save_file(family(name).weights, tmp_path / SINGLE)
    return tmp_path


def read(directory):
    settings = hf_config.settings_of(hf_config.read(directory), ModelSettings())
    model = model_of(settings)
    place = SingleDeviceSharding(jax.devices()[0])
    return model, hf.load(directory, model, dict.fromkeys(model.abstract, place))


def test_config_becomes_the_family_s_settings(name):
    found = hf_config.settings_of(json.loads(family(name).config), ModelSettings())
    for key in (*hf_config.ARCHITECTURE, "max_context"):
        assert getattr(found, key) == pytest.approx(getattr(FAMILIES[name], key)), key


def test_weights_are_those_that_give_the_logits_of_transformers(name, directory):
    """test_families.py has the logits."""
    model, params = read(directory)
    wanted = params_of(name, model)
    assert params.keys() == wanted.keys()
    assert all(np.array_equal(params[n], wanted[n]) for n in wanted)


def test_numpy_reader_is_right(name, directory):
    model = NumpyModel(directory)
    for ids, logits in zip(family(name).ids, family(name).logits, strict=True):
        np.testing.assert_allclose(model.logits(ids), logits, atol=1e-4)


def test_what_is_saved_is_what_was_loaded(name, directory):
    model, params = read(directory)
    made = directory / "made"
    hf.save(made, params, model.settings, vocab_size=model.vocab_size, copy_from=None)
    saved, weights = load_file(made / SINGLE), family(name).weights
    assert saved.keys() == weights.keys()
    assert all(np.array_equal(saved[n], weights[n]) for n in weights)
    assert hf_config.settings_of(hf_config.read(made), ModelSettings()) == model.settings
    np.testing.assert_allclose(
        NumpyModel(made).logits(family(name).ids[0]), family(name).logits[0], atol=1e-4
    )
