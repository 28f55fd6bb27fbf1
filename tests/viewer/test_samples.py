"""Episodes out of index.npz and traces.jsonl, one at a time, and every way in which a step can be unreadable."""

import base64
import json
import os

import numpy as np
import pytest

from rl_jax.names import resolve
from rl_jax.rollout.traces import read_traces
from rl_jax.tokens import ByteTokenizer
from rl_jax.viewer import api as api_module
from rl_jax.viewer import episode, failures, samples
from rl_jax.viewer.api import Api, Refusal, to_json
from rl_jax.viewer.failures import Failures
from rl_jax.viewer.samples import Samples
from rl_jax.viewer.tokens import Texts, pieces
from tests.tokens.families import write

WHO = {"step": "5", "split": "train", "i": "6"}


def column(piece, name):
    return np.frombuffer(base64.b64decode(piece["columns"][name]), api_module.COLUMNS[name])


@pytest.mark.parametrize("i", ["0", "4", "6", "8"])
def test_an_episode_is_what_was_trained_token_by_token(api, run, i):
    trajectory = read_traces(run / "rollouts" / "step_5" / "train")[int(i)]
    shown = api.answer("episode", {**WHO, "i": i})
    assert (shown["uid"], shown["task"], shown["reward"]["value"]) == (
        trajectory.uid, trajectory.task_id, trajectory.reward.value,
    )  # fmt: skip
    joined = {name: [] for name in ("ids", "logprobs", "mask", "versions", "mixed")}
    for turn, own in zip(shown["turns"], trajectory.turns, strict=True):
        assert turn["said"]["text"] == "".join(turn["tokens"]["pieces"])
        assert turn["num_prompt"] == len(own.prompt_tokens) and turn["finish"] == own.finish.value
        for name, values in joined.items():
            values += turn["tokens"][name]
    sampled = trajectory.versions >= 0
    assert joined["ids"] == trajectory.tokens[sampled].tolist()
    assert joined["versions"] == trajectory.versions[sampled].tolist()
    assert joined["mask"] == trajectory.loss_mask[sampled].tolist()
    assert joined["mixed"] == trajectory.context_mixed[sampled].tolist()
    np.testing.assert_allclose(joined["logprobs"], trajectory.logprobs[sampled], atol=1e-4)
    first = int(i) // 4 * 4
    assert [m["i"] for m in shown["members"]] == list(range(first, first + 4)) and shown[
        "consumed_by"
    ] == 4


def test_advantages_are_of_the_episode_that_is_shown(api):
    found = [api.answer("episode", {**WHO, "i": str(i)}) for i in range(4, 8)]
    rewards = np.array([one["reward"]["value"] for one in found], np.float32)
    want = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for one, advantage in zip(found, want):
        tokens = [turn["tokens"] for turn in one["turns"]]
        assert [a is not None for t in tokens for a in t["advantages"]] == [
            m for t in tokens for m in t["mask"]
        ]
        own = [a for t in tokens for a in t["advantages"] if a is not None]
        assert own and own == pytest.approx([advantage] * len(own), abs=1e-3)


def test_without_advantages_or_with_those_of_others_there_are_none(copy):
    path = copy / "rollouts" / "step_5" / "train" / "advantages.npy"
    api = Api(copy, resolve)
    for spoil in (
        lambda: np.save(path, np.zeros(3, np.float32)),
        lambda: path.write_bytes(b"x"),
        path.unlink,
    ):
        spoil()
        shown = api.answer("episode", WHO)
        assert not shown["has_advantages"] and shown["turns"][0]["tokens"]["advantages"] is None


def test_columns_come_newest_first_in_bounded_pieces(api, run, monkeypatch):
    monkeypatch.setattr(api_module, "MAX_EPISODES", 50)
    asked, steps, rewards = {"split": "train"}, [], []
    while True:
        piece = api.answer("columns", asked)
        assert piece["num"] <= 50
        steps += column(piece, "step").tolist()
        rewards += column(piece, "reward").tolist()
        if piece["next"] is None:
            break
        asked = {"split": "train", "last": str(piece["next"])}
    assert steps == [step for step in range(12, 0, -1) for _ in range(16)]
    want = [
        t.reward.value
        for step in range(12, 0, -1)
        for t in read_traces(run / "rollouts" / f"step_{step}" / "train")
    ]
    assert rewards == pytest.approx(want, abs=1e-6)
    one = api.answer("columns", {"split": "train", "first": "3", "last": "3"})
    assert set(column(one, "step").tolist()) == {3} and one["tags"] == ["maze", "sums"]
    assert [one["tags"][k] for k in column(one, "tag")][:8] == ["maze"] * 4 + ["sums"] * 4


def test_tags_of_a_step_are_its_own_and_columns_have_them_under_one_number(copy):
    path = copy / "rollouts" / "step_5" / "train" / "index.npz"
    index = dict(np.load(path))
    index["tags"] = np.array(["aaa", *index["tags"]])
    index["tag"] = index["tag"] + 1
    np.savez(path, **index)
    piece = Api(copy, resolve).answer("columns", {"split": "train"})
    tags = np.array(piece["tags"])[column(piece, "tag")]
    steps = column(piece, "step")
    for step in (4, 5, 6):
        assert tags[steps == step].tolist() == (["maze"] * 4 + ["sums"] * 4) * 2


def test_names_are_read_without_the_rest_of_the_line(api):
    found = api.answer("names", {"split": "train", "who": "5.6,5.0"})
    assert [one["uid"] for one in found] == ["generated/train/5001/2", "generated/train/5000/0"]
    assert found[0]["task"] == "task-5001"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("episode", {**WHO, "step": "99"}), "step 99 has no complete traces of train"),
        (("episode", {**WHO, "i": "16"}), "step 5 train has episodes 0 to 15, not 16"),
        (("episode", {**WHO, "split": "../train"}), "split '../train' is none of train, eval"),
        (("episode", {**WHO, "step": "-1"}), "step=-1 is not 0"),
        (("episode", {"i": "1"}), "step='None' is no number"),
        (("names", {"who": "1.x"}), "who='1.x' is no STEP.I"),
        (("nothing", {}), "nothing is at api/nothing"),
    ],
)
def test_a_question_without_sense_is_one_line(api, asked, why):
    with pytest.raises(Refusal) as refused:
        api.answer(*asked)
    assert refused.value.detail.startswith(why) and "\n" not in refused.value.detail


def _spoil_index(directory):
    (directory / "index.npz").write_bytes(b"PK\x03\x04 torn")


def _spoil_columns(directory):
    good = dict(np.load(directory / "index.npz"))
    np.savez(directory / "index.npz", **{**good, "tag": good["tag"] + 9})


def _cut_traces(directory):
    with open(directory / "traces.jsonl", "r+b") as file:
        file.truncate(1000)


@pytest.mark.parametrize("spoil", [_spoil_index, _spoil_columns, _cut_traces])
def test_a_step_that_cannot_be_read_is_told_and_the_others_are_shown(copy, spoil):
    spoil(copy / "rollouts" / "step_5" / "train")
    api = Api(copy, resolve)
    piece = api.answer("columns", {"split": "train"})
    assert piece["num"] == 11 * 16
    (fault,) = [one for one in api.answer("run", {})["faults"] if "step_5" in one]
    assert "cannot be read" in fault
    with pytest.raises(Refusal, match="cannot be read"):
        api.answer("episode", WHO)


def test_a_line_that_is_no_trajectory_is_told_and_its_bytes_are_shown(copy):
    path = copy / "rollouts" / "step_5" / "train" / "traces.jsonl"
    data = bytearray(path.read_bytes())
    start = [i for i, c in enumerate(data) if c == 10][5] + 1
    data[start : start + 7] = b"{nojson"
    path.write_bytes(data)
    api = Api(copy, resolve)
    with pytest.raises(Refusal, match="see its raw bytes"):
        api.answer("episode", WHO)
    assert api.answer("raw", {**WHO, "num": "7"})["bytes"] == "{nojson"
    assert api.answer("tools", {"step": "5"})["unreadable"] == 1
    assert api.answer("episode", {**WHO, "i": "7"})["i"] == 7


@pytest.mark.parametrize("field", ["turns", "loss_mask", "reward", "versions", "uid"])
@pytest.mark.parametrize("value", [7, "x", [1], {"a": 1}])
def test_fields_of_another_form_never_end_the_viewer(copy, field, value):
    directory = copy / "rollouts" / "step_5" / "train"
    lines = (directory / "traces.jsonl").read_bytes().splitlines(keepends=True)
    record = json.loads(lines[0])
    if field == "turns" and value == [1]:
        value = [{"num_prompt": 1e9, "num_tokens": -3}]
    lines[0] = json.dumps({**record, field: value}).encode() + b"\n"
    (directory / "traces.jsonl").write_bytes(b"".join(lines))
    index = dict(np.load(directory / "index.npz"))
    index["offset"] = np.cumsum([0, *map(len, lines[:-1])])
    np.savez(directory / "index.npz", **index)
    try:
        to_json(Api(copy, resolve).answer("episode", {**WHO, "i": "0"}))
    except Refusal as refused:
        assert "see its raw bytes" in refused.detail


def test_an_index_that_changed_is_read_again(copy):
    found = Samples(copy)
    before = found.index(5, "train")
    assert found.index(5, "train") is before
    directory = copy / "rollouts" / "step_5" / "train"
    index = {
        k: v[:8] if k not in ("tags", "outcomes") else v
        for k, v in np.load(directory / "index.npz").items()
    }
    np.savez(directory / "index.npz", **index)
    os.utime(directory / "index.npz", ns=(1, 1))
    assert found.index(5, "train").num == 8


def test_long_turns_come_in_pieces(api, monkeypatch):
    whole = api.answer("episode", WHO)["turns"][0]["tokens"]
    monkeypatch.setattr(episode, "MAX_TOKENS", 7)
    first = api.answer("episode", WHO)["turns"][0]["tokens"]
    assert len(first["ids"]) == 7 and first["left_out"] == len(whole["ids"]) - 7
    ids, left = first["ids"], first["left_out"]
    while left:
        more = api.answer("tokens", {**WHO, "turn": "0", "start": str(len(ids))})
        ids, left = ids + more["ids"], more["left_out"]
    assert ids == whole["ids"]


def test_a_line_over_the_limit_is_not_parsed(api, monkeypatch):
    monkeypatch.setattr(samples, "MAX_LINE", 1000)
    with pytest.raises(
        Refusal, match=r"a line of \d+ bytes, of which at most 1000 are read; see its raw bytes"
    ):
        api.answer("episode", WHO)
    assert len(api.answer("raw", {**WHO, "num": "100"})["bytes"]) == 100


@pytest.mark.slow(seconds=3)
def test_a_string_of_fifty_megabytes_is_shown_bounded(copy):
    directory = copy / "rollouts" / "step_5" / "train"
    lines = (directory / "traces.jsonl").read_bytes().splitlines(keepends=True)
    record = json.loads(lines[0])
    record["turns"][0]["text"] = "\ud83d<b>" * 8_000_000
    record["turns"] = record["turns"][:1]
    record["reward"]["detail"] = record["tag"] = "y" * 1_000_000
    lines[0] = json.dumps(record).encode() + b"\n"
    assert len(lines[0]) > 50_000_000
    (directory / "traces.jsonl").write_bytes(b"".join(lines))
    index = dict(np.load(directory / "index.npz"))
    index["offset"] = np.cumsum([0, *map(len, lines[:-1])])
    np.savez(directory / "index.npz", **index)
    shown = Api(copy, resolve).answer("episode", {**WHO, "i": "0"})
    assert len(to_json(shown)) < 400_000
    assert shown["turns"][0]["said"]["left_out"] == 4 * 8_000_000 - episode.MAX_TEXT
    assert "1000000 characters" in shown["tag"]


# --- tokens and tool calls -----------------------------------------------------------------------------------------


def test_pieces_put_together_are_the_text():
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode("h\u00e9llo \U0001f600 w\u00f6rld \ufffd!"), 7, 300]
    found = pieces(tokenizer.decode, ids)
    assert len(found) == len(ids) and "".join(found) == tokenizer.decode(ids)
    assert (
        found[1:3] == ["", "\u00e9"]
        and "\U0001f600" in found
        and found[-2:] == ["<|end|>", "\ufffd"]
    )
    rng = np.random.default_rng(0)
    for _ in range(50):  # what a policy at its start says
        ids = rng.integers(0, 264, 80).tolist()
        assert "".join(pieces(tokenizer.decode, ids)) == tokenizer.decode(ids)


def test_pieces_of_a_directorys_tokenizer_put_together_are_the_text(tmp_path):
    texts = Texts({"model": {"tokenizer": str(write(tmp_path / "t", "qwen25"))}}, resolve)
    assert texts.fault == ""
    text = 'na\u00efve \U0001f600 <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    ids = texts._tokenizer.encode(text)
    assert "".join(texts.pieces(ids)) == text
    assert texts.calls(text) == [{"name": "f", "arguments": {"x": 1}}]
    assert (
        "error" in texts.calls("<tool_call>{broken</tool_call>")[0] and texts.calls("no call") == []
    )


def test_without_a_tokenizer_tokens_are_numbers_and_the_reason_is_told(copy):
    config = json.loads((copy / "config.json").read_text())
    config["model"]["tokenizer"] = "os:getcwd"
    (copy / "config.json").write_text(json.dumps(config))
    shown = Api(copy, resolve).answer("episode", WHO)
    assert shown["turns"][0]["tokens"]["pieces"][0].startswith("[")
    assert "os:getcwd" in shown["token_fault"] and shown["turns"][0]["said"]["text"]


def test_tool_calls_are_counted_by_name_with_what_came_of_them(api, run):
    found = api.answer("tools", {"step": "5"})
    want = {"look": 0, "walk": 0, "unreadable": 0}
    for trajectory in read_traces(run / "rollouts" / "step_5" / "train"):
        for turn in trajectory.turns:
            text = ByteTokenizer().decode(turn.tokens)
            for name in want:
                want[name] += f'{{"name": "{name}", "arguments"' in text
            want["unreadable"] += '"argum</tool_call>' in text
    assert {kind["name"]: kind["num"] for kind in found["kinds"]} == {
        k: v for k, v in want.items() if v
    }
    assert found["scanned"] == 16 and found["finishes"] == {"eos": found["turns"]}
    example = found["kinds"][0]["examples"][0]
    assert found["kinds"][0]["name"] in ("look", "walk") and "to" in example["said"]["text"]


# --- the ledger ----------------------------------------------------------------------------------------------------


def test_failures_are_counted_as_the_ledger_has_them(api, run):
    records = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    table = api.answer("failures", {})
    for state, num in table["states"].items():
        assert num == sum(r["state"] == state for r in records)
    assert sum(table["states"].values()) == len(records) and table["fault"] == ""
    want = {(r["state"], r["reason"]) for r in records if r["reason"]}
    assert {(kind["state"], kind["reason"]) for kind in table["kinds"]} == want
    found = api.answer("examples", {"state": "ERRORED", "reason": "env_timeout"})
    assert [one["uid"] for one in found] == [
        "generated/lost/12",
        "generated/lost/8",
        "generated/lost/4",
    ]
    assert api.answer("examples", {"state": "ERRORED", "reason": "other"}) == []


def test_a_ledger_is_read_as_it_grows_and_hostile_words_do_not_count(copy, monkeypatch):
    monkeypatch.setattr(failures, "CHUNK", 1000)  # lines lie across pieces
    found = Failures(copy)
    before = found.table()["states"]
    assert before == Failures(copy).table()["states"]
    lie = {
        "seq": 1, "uid": '","state":"TRAINED","reason":null', "attempt": 0, "group": "g",
        "tag": '"tag":"x","state":"TRAINED","reason":null', "state": "DROPPED", "reason": 'a"b\\ \ud83d',
        "step": None, "start_version": 0, "versions": [], "num_tokens": 0,
    }  # fmt: skip
    with open(copy / "ledger.jsonl", "a") as out:
        out.write(json.dumps(lie, separators=(",", ":")) + "\n" + '{"seq":2,"torn')
    table = found.table()
    assert table["states"] == {**before, "DROPPED": before["DROPPED"] + 1} and table["fault"] == ""
    (kind,) = [k for k in table["kinds"] if k["reason"] == 'a"b\\ \ud83d']
    assert kind["num"] == 1 and found.examples("DROPPED", kind["reason"])[0]["uid"] == lie["uid"]
    with open(copy / "ledger.jsonl", "a") as out:
        out.write("\n" + '{"state":"VOID","step":3,"seq":9}\n')
    table = found.table()
    assert table["resumes"] == 1 and "1 lines are no records" in table["fault"]


def test_kinds_are_bounded_and_the_rest_is_counted(copy, monkeypatch):
    monkeypatch.setattr(failures, "MAX_KINDS", 8)
    table = Failures(copy).table()
    assert sum(table["states"].values()) + table["others"] == len(
        (copy / "ledger.jsonl").read_text().splitlines()
    )
    assert table["others"] > 0
