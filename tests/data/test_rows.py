"""What a line of a data file may say, and the one line that each bad one gets."""

import json

import pytest

from rl_jax.data.corpus import read_corpus
from rl_jax.data.examples import ExampleRules
from rl_jax.data.rows import DataError, RowError, parse_row
from rl_jax.settings import DataSettings
from rl_jax.tokens import ByteTokenizer, ChatRenderer
from rl_jax.types import Message

RENDERER = ChatRenderer(ByteTokenizer())
CHAT, PAIRS = ExampleRules("chat", "all", 32), ExampleRules("pairs", "all", 32)
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}

TOOL = {"role": "tool", "content": "4"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def calling(name, arguments, call_id=""):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "function": function}],
    }


def calls(*ids):
    """A message that calls f_a under the id a, and so on; no id for ""."""
    asked = [{"id": one, "function": {"name": f"f_{one}", "arguments": {}}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": asked}


def answer(content, call_id=""):
    return {**TOOL, "content": str(content), **({"tool_call_id": call_id} if call_id else {})}


def read(path, *rows, rules=CHAT, **settings):
    """Rows: objects, or lines as they stand."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return read_corpus(DataSettings(path=str(path), **settings), RENDERER, rules, seed=0)


def test_forms_of_a_prompt_and_of_an_answer_say_the_same():
    forms = [
        {"messages": [USER, ASSISTANT]},
        {"prompt": "hi", "completion": "ho", "source": "other keys are the row's own"},
        {"prompt": [USER], "completion": [{**ASSISTANT, "tool_calls": None}]},
    ]
    said = [parse_row(json.dumps(form).encode(), "chat").conversations for form in forms]
    assert said[0] == said[1] == said[2]
    pair = {"messages": [USER], "chosen": "ho", "rejected": [ASSISTANT, USER, ASSISTANT]}
    up, down = parse_row(json.dumps(pair).encode(), "pairs").conversations
    assert up == said[0][0] and len(down) == 4


def test_calls_may_be_written_as_openai_does_or_plainly():
    answer = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"}
    plain = {**calling("", {}), "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}
    for asked in (calling("add", '{"a": 2}', "c1"), calling("add", {"a": 2}, "c1"), plain):
        row = {"messages": [USER, asked, answer, ASSISTANT], "tools": [ADD], "id": 7}
        parsed = parse_row(json.dumps(row).encode(), "chat")
        (call,) = parsed.conversations[0][1].tool_calls
        assert (call.name, call.arguments, parsed.unread) == ("add", {"a": 2}, ("id",))
        assert parsed.tools == (ADD,) and parsed.conversations[0][2] == Message("tool", "4")


@pytest.mark.parametrize(
    "ids, answers, told",
    [
        ("ab", [("b", "b"), ("a", "a")], "ab"),
        ("abc", [("c", "c"), ("a", "a"), ("b", "b")], "abc"),
        ("ab", [("1", ""), ("2", "")], "12"),  # without ids: by place
        ("abc", [("b", "b"), ("a", "a"), ("3", "")], "ab3"),
        ("abc", [("c", "c"), ("2", ""), ("a", "a")], "a2c"),
        (["", ""], [("1", "x"), ("2", "y")], "12"),  # of ids that no call tells
        (["", "b"], [("1", "b"), ("2", "")], None),  # the second is at the place that the first has
        ("aa", [("1", "a"), ("2", "a")], "12"),  # of two calls with one id
    ],
)  # fmt: skip
def test_answers_stand_in_the_order_of_their_calls(ids, answers, told):
    said = [answer(*one) for one in answers]
    forms = [
        {
            "messages": [
                USER,
                calls(*ids),
                *said,
                ASSISTANT,
                USER,
                calls("z"),
                answer(9, "z"),
                ASSISTANT,
            ]
        },
        {"prompt": [USER, calls(*ids), *said], "completion": "ho"},
        {"prompt": [USER, calls(*ids)], "completion": [*said, ASSISTANT]},
        {"prompt": [USER], "completion": [calls(*ids), *said, ASSISTANT]},
    ]
    for form in forms:
        if told is None:
            with pytest.raises(RowError, match=r"answers f_b \('b'\), as .* does; keep one"):
                parse_row(json.dumps(form).encode(), "chat")
            continue
        (messages,) = parse_row(json.dumps(form).encode(), "chat").conversations
        assert [m.content for m in messages[2 : 2 + len(told)]] == list(told)
        assert [m.role for m in messages[: 3 + len(told)]] == ["user", "assistant"] + [
            "tool"
        ] * len(told) + ["assistant"]
    pair = {"prompt": [USER], "chosen": [calls(*ids), *said, ASSISTANT], "rejected": "no"}
    if told:
        up, _ = parse_row(json.dumps(pair).encode(), "pairs").conversations
        assert "".join(m.content for m in up if m.role == "tool") == told


def test_a_last_call_needs_no_answer():
    row = {"messages": [USER, calls("a", "b"), answer(2, "b"), answer(1, "a"), calls("c")]}
    (messages,) = parse_row(json.dumps(row).encode(), "chat").conversations
    assert [m.content for m in messages] == ["hi", "", "1", "2", ""]


def test_keys_that_nothing_reads_are_named_once(tmp_path):
    rows = [{"prompt": "hi", "completion": "ho", f"key_{i}": i, "id": i} for i in range(8)]
    told = read(tmp_path / "r", *rows).describe()
    assert told.endswith("; not read: key_0, id, key_1, key_2, key_3, key_4 ...")
    assert "not read" not in read(tmp_path / "r", {"prompt": "hi", "completion": "ho"}).describe()


BAD = [
    (CHAT, "{", "is no JSON"),
    (CHAT, "[1]", "is a list, no object; write"),
    (CHAT, {"message": [USER]}, "has the key 'message', which nothing reads; write messages, or give it a name"),
    (CHAT, {"prompt": "hi", "completion": "ho", "complation": "x"}, "has the key 'complation', which nothing"),
    (PAIRS, {"prompt": "hi", "chosen": "a", "reject": "b"}, "nothing reads; write rejected, or give"),
    (CHAT, {"source": 1}, "has the keys source but no prompt; write"),
    (CHAT, {"tools": 1, "messages": [USER, ASSISTANT]}, "has tools that cannot be offered: tools is a number, no list"),
    (CHAT, {"tools": [{}], "messages": [USER, ASSISTANT]}, "has tools that cannot be offered: tools[0] must be"),
    (CHAT, {"messages": [USER, {"role": "tool", "content": "4"}, ASSISTANT]}, "message 1 is of the tool, but no call"),
    (CHAT, {"messages": [USER, calling("add", 1), ASSISTANT]}, "the arguments of add are a number; give an object"),
    (CHAT, {"messages": [USER, calling("add", "{"), ASSISTANT]}, "the arguments of add are no JSON"),
    (CHAT, {"messages": [USER, calling(None, {}), ASSISTANT]}, "messages[1].tool_calls[0] must be"),
    (CHAT, {"messages": [USER, {**ASSISTANT, "tool_calls": 1}]}, "messages[1].tool_calls is a number; it must be"),
    (CHAT, {"messages": [{**USER, "tool_calls": [1]}, ASSISTANT]}, "messages[0] has tool_calls, which the chat"),
    (CHAT, {"tools": [ADD], "messages": [USER, calling("sub", {}), TOOL, ASSISTANT]},
     "calls what it does not offer in message 1: there is no tool 'sub'; the tools are add"),
    (CHAT, {"messages": [USER, calling("add", {}, "x"), {**TOOL, "tool_call_id": "y"}, ASSISTANT]},
     "messages[2] answers the call 'y', which the assistant's message before it does not have (its ids: x); correct"),
    (CHAT, {"messages": [USER, calls("a", "b"), answer(1, "a"), answer(2, "a"), ASSISTANT]},
     "messages[3] answers f_a ('a'), as messages[2] does; keep one of them, or give each the tool_call_id of its own"),
    (CHAT, {"messages": [USER, calls("a", "b"), answer(1, "b"), answer(2), ASSISTANT]},
     "messages[3] answers f_b ('b'), as messages[2] does; keep one"),
    (CHAT, {"messages": [USER, calls("a", "b"), answer(1, "b"), ASSISTANT]},
     "messages[1] calls f_a ('a'), which no tool's message answers before messages[3]; add the answer, or take the"),
    (CHAT, {"messages": [USER, calls("a", "b"), answer(1, "b"), USER, answer(2, "a"), ASSISTANT]},
     "messages[1] calls f_a ('a'), which no tool's message answers before messages[3]"),
    (CHAT, {"messages": [USER, calls("", ""), answer(1), ASSISTANT]}, "messages[1] calls f_, which no tool's message"),
    (CHAT, {"prompt": [USER, calls("a"), answer(1, "z")], "completion": "ho"}, "prompt[2] answers the call 'z', which"),
    (CHAT, {"prompt": [USER, calls("a")], "completion": "ho"}, "prompt[1] calls f_a ('a'), which no tool's message "
     "answers before completion; add"),
    (CHAT, {"messages": [USER, calls("a"), answer(1, "a"), answer(2), ASSISTANT]}, "message 3 is of the tool, but no"),
    (PAIRS, {"prompt": "hi", "chosen": [calls("a"), ASSISTANT], "rejected": "b"}, "chosen[0] calls f_a ('a'), which"),
    (CHAT, {"messages": [USER, ASSISTANT], "prompt": "hi"}, "has messages and prompt; keep one of the two forms"),
    (CHAT, {"messages": [USER, ASSISTANT], "completion": "ho"}, "has messages and completion; keep one"),
    (PAIRS, {"messages": [USER], "prompt": "hi", "chosen": "a", "rejected": "b"}, "has messages and prompt; keep"),
    (CHAT, {"prompt": "hi", "completion": ""}, "completion has no word to learn; write the answer, or take the row"),
    (CHAT, {"prompt": "hi", "completion": " \n"}, "completion has no word to learn"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[1].content has no word to learn"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": ""}, USER, ASSISTANT]}, "messages[1].content has no"),
    (PAIRS, {"prompt": "hi", "chosen": "", "rejected": "b"}, "chosen has no word to learn"),
    (CHAT, {"prompt": "hi"}, "has the keys prompt but no completion"),
    (CHAT, {"messages": []}, "messages is empty; it must be a list of messages"),
    (CHAT, {"messages": "hi"}, "messages is a text; it must be a list"),
    (CHAT, {"prompt": 1, "completion": "ho"}, "prompt is a number; it must be a text or a list"),
    (CHAT, {"messages": [USER]}, "ends with a message of the user, which nothing answers"),
    (CHAT, {"messages": [ASSISTANT]}, "begins with the assistant; give it something to answer"),
    (CHAT, {"messages": [USER, "ho"]}, "messages[1] is a text"),
    (CHAT, {"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role is 'bot'; use one of system"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None}]}, "[1].content is null; it must be a text"),
    (CHAT, {"messages": [USER, {**ASSISTANT, "weight": 0}]}, "[1] has weight, which the chat format cannot"),
    (PAIRS, {"prompt": "hi", "chosen": "a"}, "has the keys prompt, chosen but no rejected"),
    (PAIRS, {"chosen": "a", "rejected": "b"}, "has the keys chosen, rejected but no prompt"),
]  # fmt: skip


@pytest.mark.parametrize("rules, row, told", BAD)
def test_bad_row_is_told_by_file_and_line(tmp_path, rules, row, told):
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "hi", "completion": "ho", "chosen": "ho", "rejected": "no"}
    with pytest.raises(DataError) as error:
        read(path, good, "", row, rules=rules)
    assert len(error.value.errors) == 1
    assert error.value.errors[0].startswith(f"{path}:3: the row ") and told in str(error.value)


def test_what_is_rejected_may_be_empty(tmp_path):
    corpus = read(tmp_path / "r", {"prompt": "hi", "chosen": "ho", "rejected": ""}, rules=PAIRS)
    assert len(corpus.train) == 1


def test_many_bad_rows_are_told_together_and_the_rest_counted(tmp_path):
    with pytest.raises(DataError) as error:
        read(tmp_path / "rows.jsonl", *["{"] * 8)
    assert [e.partition(": ")[2][:7] for e in error.value.errors[:5]] == ["the row"] * 5
    assert error.value.errors[5].endswith("3 more rows are bad")


def test_rows_that_are_too_long_are_dropped_cut_or_refused_and_counted(tmp_path):
    path, short = tmp_path / "rows.jsonl", {"prompt": "hi", "completion": "ho"}
    long_answer = {"prompt": "hi", "completion": "x" * 40}
    long_prompt = {"prompt": "x" * 40, "completion": "ho"}  # cut, nothing of it would train
    rows = short, long_answer, long_prompt
    dropped = read(path, *rows)
    assert (len(dropped.train), dropped.counts["too_long"], dropped.counts["cut"]) == (1, 2, 0)
    assert "3 rows, 2 dropped as too long; 1 to train on" in dropped.describe()
    cut = read(path, *rows, too_long="truncate")
    assert (len(cut.train), cut.counts["too_long"], cut.counts["cut"]) == (2, 1, 1)
    assert len(cut.train[1].trajectories[0].tokens) == 32
    assert dropped.digest == cut.digest
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: the row has 47 tokens, more than.*row_tokens=32"
    ):
        read(path, *rows, too_long="error")
    with pytest.raises(DataError, match=r"has 1 rows and none trains \(1 are longer than"):
        read(path, long_answer)


def test_pair_of_equals_prefers_nothing_and_is_counted(tmp_path):
    row = {"prompt": "hi", "chosen": "ho", "rejected": "no"}
    corpus = read(tmp_path / "r", row, {**row, "rejected": "ho"}, rules=PAIRS)
    assert len(corpus.train) == 1 and corpus.counts["equal"] == 1
    assert [t.reward.value for t in corpus.train[0].trajectories] == [1.0, 0.0]


def test_held_out_rows_are_a_share_drawn_by_the_seed_or_another_file(tmp_path):
    rows = [{"prompt": f"{i}", "completion": "ho"} for i in range(8)]
    corpus = read(tmp_path / "r", *rows, eval_share=0.25)
    tokens = [g.trajectories[0].tokens[2] for g in (*corpus.train, *corpus.held_out)]
    assert (len(corpus.train), len(corpus.held_out)) == (6, 2) and len(set(tokens)) == 8
    again = read(tmp_path / "r", *rows, eval_path=str(tmp_path / "r"))
    assert (len(again.train), len(again.held_out)) == (8, 8)
    assert "8 held out, 8 of them also trained on (the first: " in again.describe()
    assert f"{tmp_path / 'r'}:1); " in again.describe() and again.counts["also_trained"] == 8
    assert "also trained" not in corpus.describe() and corpus.counts["also_trained"] == 0
    twice = read(tmp_path / "twice", *[rows[0]] * 4, eval_share=0.25)
    assert "1 held out, 1 of them also trained on" in twice.describe()
    with pytest.raises(
        DataError, match="data.eval_share=0.01 of 8 rows is 0, which leaves nothing to evaluate"
    ):
        read(tmp_path / "r", *rows, eval_share=0.01)


def test_file_that_changes_under_the_run_is_noticed(tmp_path):
    corpus = read(tmp_path / "r", {"prompt": "hi", "completion": "ho"})
    (tmp_path / "r").write_text(json.dumps({"prompt": "hi", "completion": "no"}) + "\n")
    with pytest.raises(DataError, match="was changed while the run reads it"):
        corpus.train[0]
