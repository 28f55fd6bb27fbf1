"""The shell: state between turns, checks at the end, and commands that break things."""

import pytest

from envs.shell import FAMILIES, Shell
from rl_jax.types import Action, ToolCall
from tests.sandbox.opened import sandbox_or_skip

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def sandbox():
    sandbox_or_skip()


def opened(family, **config):
    task = Shell.tasks({"num_tasks": 2, "eval_size": 2, "families": (family,), **config}, "train")[
        0
    ]
    env = Shell()
    env.reset(task, 0)
    return env, task


def run(env, *commands):
    """What the tool says to each, and the last result."""
    said = []
    for command in commands:
        result = env.step(Action("", (ToolCall("shell", {"command": command}),)))
        said += [message.content for message in result.messages]
    return said, result


def test_files_last_between_turns_and_processes_do_not():
    env, _ = opened("write")
    said, _ = run(
        env,
        "mkdir d; echo one > d/a; sleep 60 & cd d",
        "cat d/a; pwd; cat /proc/[0-9]*/comm | grep -c sleep",
        "exit 3",
        "sleep 60 & sleep 0.3; cat /proc/[0-9]*/comm | grep -c sleep >&2",
    )
    ok = "[exit status 0]"
    assert said == [ok, "one\n/box/work\n0\n[exit status 1]", "[exit status 3]", f"1\n{ok}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_solution_passes_and_what_is_nearly_it_does_not(family):
    env, task = opened(family)
    _, result = run(env, *task.payload["solution"])
    assert not result.done
    assert env.step(Action("done")).reward == 1.0
    spoiled = {
        "write": "echo more >> {first}", "count": "echo 1 >> answer", "rename": "touch {gone}",
        "total": "for f in *.sh; do echo 'echo 1' >> $f; done",
    }[family]  # fmt: skip
    wanted = task.payload["wanted"]
    names = {
        "first": next(iter(wanted), ""),
        "gone": next((n for n, c in wanted.items() if c is None), ""),
    }
    env.reset(task, 0)
    run(env, *task.payload["solution"], spoiled.format(**names))
    result = env.step(Action("done"))
    assert (result.reward, result.done, result.info["success"]) == (0.0, True, 0.0)
    env.reset(task, 0)
    assert env.step(Action("")).reward == 0.0


def test_a_command_that_a_limit_ends_changes_nothing():
    env, _ = opened("write", wall_s=0.7)
    said, _ = run(env, "echo a > kept", "echo so far; rm kept; sleep 9", "cat kept")
    assert said == [
        "[exit status 0]",
        "so far\n[stopped by the limit of wall; nothing was changed]",
        "a\n[exit status 0]",
    ]


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /box/work /box/tmp",
        "chmod 000 .",
        "mkfifo answer; ln -s /etc/passwd x; mkdir y; chmod 000 y",
        "ln -sfn / here; ln -s ../../../.. up",
        "for i in 1 2 3 4 5 6 7 8 9; do (setsid sleep 50 &) ; done",
        "kill -9 -1",
        "kill -STOP $PPID & kill -9 $PPID",
        "yes > big",
        "head -c 100000 /dev/zero | tr '\\0' y",
        "exec 2>&- 1>&- 0<&-; echo x",
        "touch -- -rf '--checkpoint-action=exec=sh' \"$(printf 'a\\nb')\"",
    ],
)
def test_a_command_that_breaks_things_is_the_policys_own_loss(command):
    """The episode goes on and is scored; nothing is charged to the sandbox."""
    env, task = opened("write", wall_s=3.0)
    run(env, command, "echo x > y", "ls -la")
    result = env.step(Action("done"))
    assert result.done and result.reward == 0.0


def test_calls_are_counted_and_the_last_one_ends_the_episode():
    env, task = opened("write", max_calls=3)
    result = env.step(Action("", (ToolCall("bash", {"command": "x"}),)))
    assert result.messages[0].content == "error: the tool is shell(command: string)"
    _, result = run(env, "x" * 9000)
    assert "at most 8000 characters" in result.messages[0].content
    command = "; ".join(task.payload["solution"])
    result = env.step(Action("", (ToolCall("shell", {"command": command}),) * 2))
    assert (result.reward, result.done) == (1.0, True)
    assert result.messages[1].content == "error: no more than 3 commands"
    assert result.info == {"success": 1.0, "calls": 4.0, "failed_calls": 3.0}


def test_settings_that_cannot_be_are_told():
    for config, said in (
        ({"families": ("walk",)}, "must be some of write, count, rename, total"),
        ({"max_calls": 0}, "max_calls=0 must be at least 1"),
        ({"memory_mb": 1}, "memory_mb=1 at least 64"),
    ):
        with pytest.raises(ValueError, match=said):
            Shell.tasks(config, "train")
    with pytest.raises(RuntimeError, match="no program"):
        Shell.tasks({"sandbox": "nsjail:/no/nsjail"}, "train")
