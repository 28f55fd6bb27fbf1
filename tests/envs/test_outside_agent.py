"""An agent outside rl_jax as an episode: its calls are turns, and what is trained is what was sampled."""

import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from ml_collections import ConfigDict

from envs.outside_agent import AgentFault, OutsideAgent
from rl_jax.types import Action, ToolCall

HERE = "tests.envs.test_outside_agent"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def post(base_url, key, body, path="/chat/completions"):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def user(text):
    return {"role": "user", "content": text}


def rewrites(base_url, key, payload):
    """What an agent does to its history, one after the other."""
    ask = lambda *messages: post(base_url, key, {"messages": [*messages]})["choices"][0]["message"]
    first = user("a")
    said = ask(first)
    ask(first)  # the same again, as if there had been no answer
    ask(user("sum"), said, user("b"))  # a summary, and an answer of the policy out of its place
    again = ask(user("sum"), said)  # cut
    made_up = {"role": "assistant", "content": "mine"}
    ask(user("sum"), said, again, user("c"))
    ask(user("sum"), said, again, user("c"), said, made_up, user("d"))  # not all the policy's
    return 2.0


def sleeps(base_url, key, payload):
    post(base_url, key, {"messages": [user("a")]})
    time.sleep(2)


def raises(base_url, key, payload):
    post(base_url, key, {"messages": [user("a")]})
    raise RuntimeError("of the agent")


def never_calls(base_url, key, payload):
    return 1.0


def uses_a_tool(base_url, key, payload):
    messages = [user("2 + 3")]
    said = post(base_url, key, {"messages": messages, "tools": [ADD]})["choices"][0]
    assert said["finish_reason"] == "tool_calls"
    call = said["message"]["tool_calls"][0]
    total = sum(json.loads(call["function"]["arguments"]).values())
    messages += [
        said["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": str(total)},
    ]
    return float(
        post(base_url, key, {"messages": messages, "tools": [ADD]})["choices"][0]["message"][
            "content"
        ]
    )


def knocks(base_url, key, payload):
    """What the endpoint refuses, as status codes."""
    codes = []
    for path, given, body in (
        ("/chat/completions", "wrong", {"messages": [user("a")]}),
        ("/completions", key, {"prompt": "a"}),
        ("/chat/completions", key, {"messages": 5}),
        ("/chat/completions", key, {"messages": []}),
        ("/chat/completions", key, {"messages": [user("a")], "n": 2}),
    ):
        try:
            post(base_url, given, body, path)
        except urllib.error.HTTPError as error:
            codes.append(error.code)
    post(base_url, key, {"messages": [user(repr(codes))]})
    return 0.0


def started(agent, **config):
    env = OutsideAgent()
    (task, *_) = env.tasks({"agent": f"{HERE}:{agent}", "num_tasks": 1, **config}, "train")
    return env, env.reset(task, 0)


def test_the_agents_tools_are_the_policys():
    env, first = started("uses_a_tool", tools=(ADD,))
    assert [m.content for m in first.messages] == ["2 + 3"]
    second = env.step(Action("", (ToolCall("add", {"a": 2, "b": 3}),)))
    assert [(m.role, m.content) for m in second.messages] == [("tool", "5")]
    last = env.step(Action("5"))
    assert last.done and last.reward == 5.0


def test_an_agent_that_rewrites_its_history_begins_a_new_context():
    env, seen = started("rewrites")
    told = []
    while not seen.done:
        told.append((seen.new_context, [m.content for m in seen.messages]))
        seen = env.step(Action("said"))
    assert told == [
        (False, ["a"]),
        (True, ["a"]),
        (True, ["sum", "said", "b"]),
        (True, ["sum", "said"]),
        (False, ["c"]),
        (True, ["sum", "said", "said", "c", "said", "mine", "d"]),
    ]
    assert seen.reward == 2.0


@pytest.mark.parametrize(
    "agent, config, told",
    [
        ("sleeps", {"agent_timeout_s": 0.2}, "within 0.2 s"),
        ("uses_a_tool", {}, "other tools than"),
        ("never_calls", {}, "ended without a call"),
    ],
)
def test_what_no_episode_can_be_made_of_is_a_fault(agent, config, told):
    with pytest.raises(AgentFault, match=told):
        env, _ = started(agent, **config)
        env.step(Action("hm"))


def test_what_the_agent_raises_is_the_episodes():
    env, _ = started("raises")
    with pytest.raises(RuntimeError, match="of the agent"):
        env.step(Action("x"))


def test_the_endpoint_refuses_what_is_no_call():
    _, first = started("knocks")
    assert first.messages[0].content == "[401, 404, 400, 400, 400]"


def test_closing_ends_the_endpoint_and_the_agent():
    before = set(threading.enumerate())
    env, _ = started("rewrites")
    new = set(threading.enumerate()) - before
    env.close()
    for thread in new:
        thread.join(5)
    assert len(new) >= 2 and not any(thread.is_alive() for thread in new)


def get_config() -> ConfigDict:
    """A job whose episodes are an outside agent's; the log's path comes over the command line."""
    from tests import job_config

    config = job_config.get_config()
    config.steps = 2
    config.engine.update(context=256, chunk_sizes=(64,))
    config.learner.update(row_tokens=256)
    config.rollout.update(max_new_tokens=6, max_turns=4)
    config.warm_start.steps = 0
    config.eval.update(episodes=1)
    own = {"agent": "tests.envs.openai_agent:play", "num_tasks": 8, "data": {"log": ""}}
    config.tasks.sources = [
        ConfigDict({"tag": "agent", "env": "outside_agent", "script_episodes": 0, "config": own})
    ]
    return config


@pytest.mark.slow(seconds=20)
def test_grpo_trains_what_the_outside_agents_calls_sampled(tmp_path):
    """Two steps of GRPO on an agent that is written with the official client."""
    pytest.importorskip("openai")
    from rl_jax import launch
    from rl_jax.rollout.traces import read_groups
    from rl_jax.tokens import ByteTokenizer

    log, run = tmp_path / "log", tmp_path / "run"
    config = f"--config={__file__}"
    assert (
        launch.main(
            [config, f"--run_dir={run}", f"--config.tasks.sources[0].config.data.log={log}"]
        )
        == 0
    )
    heard = {
        (row["index"], tuple(row["said"])) for row in map(json.loads, log.read_text().splitlines())
    }
    tokenizer, num, forks = ByteTokenizer(), 0, 0
    for step in (1, 2):
        for group in read_groups(run / "rollouts" / f"step_{step}" / "train"):
            for episode in group.trajectories:
                sampled = np.concatenate([turn.tokens for turn in episode.turns])
                assert len(episode.turns) == 2 and episode.reward.status == "scored"
                # Every other task's agent sums up what was said before it goes on.
                index = int(episode.task_id.rpartition("/")[2])
                assert len(episode.sample_starts) == 1 + index % 2
                forks += index % 2
                # Trained ids are sampled ids, and these are the words that the agent's client was given.
                assert episode.tokens[episode.loss_mask].tolist() == sampled.tolist()
                said = tuple(_words(tokenizer, turn.tokens) for turn in episode.turns)
                assert (index, said) in heard
                num += 1
    assert num == 8 and 0 < forks < 8
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("episodes/forked_contexts", 0) for row in rows) >= forks
    assert any(row.get("optim/grad_norm", 0) > 0 for row in rows)


def _words(tokenizer, tokens):
    stop = len(tokens) and int(tokens[-1]) in tokenizer.stop_token_ids
    return tokenizer.decode(tokens[:-1] if stop else tokens)
