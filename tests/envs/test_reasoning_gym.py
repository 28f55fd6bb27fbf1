"""reasoning-gym tasks: disjoint splits, bare questions, its own scores."""

import importlib
import random

import pytest

from rl_jax.types import Action

pytestmark = pytest.mark.slow  # importing reasoning_gym takes seconds

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def module():
    return importlib.import_module("envs.reasoning_gym")


def ask(module, task, text):
    env = module.ReasoningGym()
    env.reset(task, 0)
    return env.step(Action(text))


def test_score_is_the_datasets_own(module):
    task = module.ReasoningGym.tasks({"dataset": "chain_sum", "dataset_config": SMALL}, "train")[0]
    assert (
        task.messages[0].content
        == "State the final answer to the following arithmetic problem: 0 - 4 ="
    )
    assert task.payload["answer"] == "-4"
    right, wrong, longer, nothing = (
        ask(module, task, text) for text in (" -4\n", "4", "-4 it is", " ")
    )
    assert (right.reward, right.done, right.info) == (1.0, True, {"success": 1.0, "no_answer": 0.0})
    assert (wrong.reward, nothing.reward) == (0.0, 0.0)
    assert 0 < longer.reward < 1 and longer.info["success"] == 0.0
    assert nothing.info["no_answer"] == 1.0


def test_answer_pattern_takes_the_last_match(module):
    config = {"dataset_config": SMALL, "answer_pattern": r"=\s*(-?\d+)", "prompt": "Q: {question}"}
    task = module.ReasoningGym.tasks(config, "train")[0]
    assert task.messages[0].content.startswith("Q: State")
    assert ask(module, task, "is = 3? no = -4").reward == 1.0
    assert ask(module, task, "-4").info["no_answer"] == 1.0


def test_neighbouring_seeds_of_a_dataset_overlap_and_the_splits_do_not(module):
    dataset = module.reasoning_gym.create_dataset
    shifted = dataset("chain_sum", seed=1, size=10)[2], dataset("chain_sum", seed=0, size=10)[3]
    assert (
        shifted[0]["question"] == shifted[1]["question"]
    )  # why the seeds of the splits lie far apart
    config = {"dataset_config": SMALL, "size": 400, "eval_size": 50}
    splits = {split: module.ReasoningGym.tasks(config, split) for split in ("train", "eval")}
    questions = {
        split: {task.messages[0].content for task in tasks} for split, tasks in splits.items()
    }
    assert len(splits["eval"]) == len(questions["eval"]) == 50
    assert 200 < len(splits["train"]) < 400
    assert not questions["train"] & questions["eval"]


@pytest.mark.parametrize("dataset", ["chain_sum", "gcd", "products", "spell_backward"])
def test_bare_questions_are_short_and_still_scored(module, dataset):
    config = {"dataset": dataset, "bare": True, "size": 20, "eval_size": 5}
    for task in module.ReasoningGym.tasks(config, "train"):
        assert 0 < len(task.messages[0].content) < 60
        assert ask(module, task, task.payload["answer"]).reward == 1.0


def test_near_misses_are_wrong(module):
    rng = random.Random(0)
    for right in ("0", "-7", "123", "word", "a"):
        for _ in range(50):
            near = module.near_miss(right, rng, lambda i: "word")
            assert near != right
            if right.lstrip("-").isdigit():
                assert abs(int(near) - int(right)) <= 9


def test_a_hedging_script_holds_the_right_answer_and_does_not_pass(module):
    config = {"dataset_config": SMALL, "size": 20, "eval_size": 5, "script_miss": "{answer} ?"}
    for task in module.ReasoningGym.tasks(config, "train"):
        env = module.ReasoningGym()
        env.reset(task, 0)
        text = env.script(random.Random(0), 0.0)
        assert text == f"{task.payload['answer']} ?"
        result = env.step(Action(text))
        assert 0 < result.reward < 1 and result.info["success"] == 0.0


def test_a_dataset_without_answers_says_so_when_scripted(module):
    env = module.ReasoningGym()
    env.reset(
        module.ReasoningGym.tasks(
            {"dataset": "propositional_logic", "size": 2, "eval_size": 2}, "train"
        )[0],
        0,
    )
    with pytest.raises(
        ValueError, match=r"propositional_logic holds no answers to script; set warm_start.steps=0"
    ):
        env.script(random.Random(0), 1.0)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"dataset": "nope"}, "no dataset 'nope'; its datasets: ab, acre"),
        (
            {"dataset_config": {"foo": 1}},
            "dataset_config of chain_sum: .*unexpected keyword argument 'foo'",
        ),
        ({"dataset_config": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        (
            {"dataset_config": SMALL, "eval_size": 300},
            "has only 200 distinct questions in 6000 items",
        ),
        (
            {"dataset_config": SMALL, "size": 5, "eval_size": 200},
            "each of the size=5 training questions",
        ),
        ({"dataset": "maze", "bare": True}, "bare has no pattern for dataset='maze'"),
        (
            {"bare": True, "question_pattern": "x(y)z"},
            r"question_pattern='x\(y\)z' is not in the question",
        ),
        ({"answer_pattern": "abc"}, "answer_pattern='abc' must have a group"),
        ({"script_miss": "{answer} "}, r"script_miss='\{answer\} ' is the right answer"),
        ({"prompt": "hi"}, r"must hold \{question\}"),
        ({"size": 0}, "size=0 and eval_size=64 must be at least 1"),
    ],
)
def test_impossible_settings_are_told_with_the_remedy(module, config, message):
    with pytest.raises(ValueError, match=message):
        module.ReasoningGym.tasks(config, "train")
