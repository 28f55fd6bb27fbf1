"""Hidden tests: what passes, what nearly passes, what only claims to; and that no answer runs in this process."""

import os

import pytest

from rl_jax.sandbox.grade import answered_code, check_tests, open_grader, same
from tests.sandbox.opened import sandbox_or_skip

DOUBLE = [{"args": [n], "expected": 2 * n} for n in (3, 0, -4)]
ECHO = [{"stdin": "3\n4\n", "stdout": "7"}, {"stdin": "1\n1\n", "stdout": "2\n"}]


@pytest.fixture(scope="module")
def grader():
    sandbox_or_skip()
    return open_grader("bubblewrap", "python3", 2.0, 128)


ANSWERS = {
    "right": ("def f(n): return 2 * n", (1, 1, 1), ""),
    "right, and prints": ("def f(n):\n    print('[0, \"value\", 0]')\n    return n + n", (1, 1, 1), ""),
    "one case wrong": ("def f(n): return abs(2 * n)", (1, 1, 0), "test 2: wrong value"),
    "float": ("def f(n): return 2.0 * n", (0, 0, 0), "test 0: wrong value"),
    "text": ("def f(n): return str(2 * n)", (0, 0, 0), "test 0: wrong value"),
    "no number": ("def f(n): return float('nan')", (0, 0, 0), "test 0: wrong value"),
    "raises": ("def f(n):\n    1 // n\n    return 2 * n", (1, 0, 1), "test 1: ZeroDivisionError"),
    "no JSON": ("def f(n): return {1, 2}", (0, 0, 0), "test 0: TypeError"),
    "no function": ("g = 1", (0, 0, 0), "there is no function f"),
    "no Python": ("def f(n) return", (0, 0, 0), "SyntaxError"),
    "exits": ("import os\ndef f(n):\n    os._exit(0)", (0, 0, 0), "it printed no answers"),
    "exits in the second": ("import os\ndef f(n): return 6 if n == 3 else os._exit(3)", (1, 0, 0), "exit status 3"),
    "hangs": ("def f(n):\n    while True: pass", (0, 0, 0), "stopped: it "),
    "takes memory": ("def f(n): return len(bytearray(1 << 30))", (0, 0, 0), "test 0: MemoryError"),
    "nothing": ("", (0, 0, 0), "there is no function f"),
    "a lone surrogate": ("x = '\ud835'", (0, 0, 0), "there is no function f"),
    "too long": ("#" * 70_000, (0, 0, 0), "more than 65536 bytes"),
    "claims to pass": (
        "import os\nfor i in range(3):\n    os.write(3, b'[%d, \"value\", true]\\n' % i)\nos._exit(0)", (0, 0, 0), ""
    ),
}  # fmt: skip


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("name", ANSWERS)
def test_functions_are_graded_case_by_case(name, grader):
    code, passed, said = ANSWERS[name]
    grade = grader.grade(code, DOUBLE)
    assert grade.passed == tuple(map(bool, passed)) and said in grade.said
    assert grade.fraction == sum(passed) / 3 and grade.is_right == all(passed)


SEEK = """
import glob
wanted, seen = "73" + "219", ""
for path in glob.glob("/box/**", recursive=True) + glob.glob("/proc/[0-9]*/*"):
    try:
        seen += open(path, errors="replace").read(100_000)
    except OSError:
        pass
def f(n):
    return int(wanted) if wanted in seen else 0
"""


@pytest.mark.slow
def test_what_is_expected_never_enters_the_sandbox(grader):
    assert grader.grade(
        SEEK, [{"args": [73219], "expected": 73219}]
    ).is_right  # it does find what is there
    assert not grader.grade(SEEK, [{"args": [1], "expected": 73219}]).is_right


@pytest.mark.slow
def test_programs_are_graded_by_what_they_print(grader):
    right = "print(int(input()) + int(input()))"
    assert grader.grade(right, ECHO).passed == (True, True)
    wrong = grader.grade("print(int(input()) * 2 + 1)", ECHO)
    assert wrong.passed == (True, False) and wrong.said == "test 1: wrong output"
    ended = grader.grade(f"{right}\nraise ValueError('x')", ECHO)
    assert ended.passed == (False, False) and ended.said == "test 0: ValueError: x"


@pytest.mark.slow
def test_an_answer_has_no_effect_outside(grader, tmp_path):
    mark = tmp_path / "mark"
    attack = f"__import__('os').system('touch {mark}; kill -9 {os.getpid()}')"
    for code in (attack, f"def f(n):\n    return {attack}", f"def f(n=({attack})): return n"):
        assert not grader.grade(code, DOUBLE).is_right
    assert not mark.exists()


def test_values_are_equal_with_their_types():
    assert same([1, {"a": [None, "x"]}], [1, {"a": [None, "x"]}])
    for value, expected in (
        (1, 1.0), (True, 1), (0, False), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("1", 1), (None, 0), ([True], [1]),
    ):  # fmt: skip
        assert not same(value, expected) and not same(expected, value)


def test_code_is_the_last_fenced_block_or_all():
    assert answered_code(" a+b\n") == "a+b"
    said = "First:\n```python\nx = 1\n```\nthen\n```\ny = 2\n```\ndone"
    assert answered_code(said) == "y = 2"
    assert answered_code("```python\nunfinished") == "```python\nunfinished"


@pytest.mark.parametrize(
    "tests", [None, [], "args", [1], [{"args": [1]}], [DOUBLE[0], ECHO[0]], [{**DOUBLE[0], "x": 1}]]
)
def test_what_is_no_test_is_named(tests):
    with pytest.raises(ValueError, match=r"tests(\[\d\])? must"):
        check_tests(tests)
