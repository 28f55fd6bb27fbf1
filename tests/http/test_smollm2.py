"""SmolLM2 behind HTTP says what transformers makes of the same file, greedily (tests/data/make_smollm2_greedy.py)."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rl_jax.mesh.plan import MeshPlan
from rl_jax.serving import Service
from rl_jax.testing.http_world import World
from rl_jax.tools import serve
from tests.models.smollm2 import DIRECTORY, needs_smollm2

pytestmark = [needs_smollm2, pytest.mark.slow(seconds=30)]
ROWS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())


@pytest.fixture(scope="module")
def world():
    words = [str(DIRECTORY), "--context=64", "--slots=20", "--num_stop_tokens=2"]
    settings, limits, _ = serve.check(serve.parser().parse_args(words))
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    # Without alternatives there is one program less.
    service = Service(settings, plan, "smollm2", replace(limits, logprobs=0))
    service.start()
    world = World(service.api.sampler, service.cluster.decode, api=service.api)
    yield world
    world.stop()
    service.close()


def test_the_greedy_text_of_20_prompts_is_transformers(world):
    assert (
        len(ROWS) == 20 and min(row["gap"] for row in ROWS) > 1e-3
    )  # no tie that rounding decides
    answers = {}

    def ask(row):
        body = {
            "prompt": row["prompt"], "max_tokens": len(row["tokens"]), "temperature": 0, "ignore_eos": True,
            "skip_special_tokens": False, "return_token_ids": True,
        }  # fmt: skip
        answers[row["prompt"]] = world.post("/v1/completions", body, timeout=120).body

    threads = [threading.Thread(target=ask, args=(row,)) for row in ROWS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in ROWS:
        answer = answers[row["prompt"]]
        assert answer["prompt_token_ids"] == row["prompt_tokens"]
        choice = answer["choices"][0]
        assert choice["token_ids"] == row["tokens"] and choice["text"] == row["text"]
