"""The program of a worker process: many live environments, or scorers, behind JSON lines on stdin and stdout.

    python -m rl_jax.rollout.env_process [--parent=PID]      started by rollout/place.py only

Owns: the environments' instances. Invariants: requests are answered one at a time, in their order, one line each, and
an answer is written before the next request is begun; so the driver knows that what hangs is the oldest request it has
no answer to. An exception of an environment is an answer (its kind and one line), never the end of the worker; the full
traceback goes to stderr, which the driver keeps as the worker's log. What environments print goes there too: the pipe
to the driver is not reachable as stdout.

Life
    1. the first line says which environments and scorers to import; the answer is what they offer, or the import error
    2. tasks: the tasks of a source's split, in parts
    3. reset makes an instance for an episode's id; step and script act on it; close ends it; score calls a scorer
    4. at the end of stdin, which is also the driver's death, instances are closed and the process group ends

Must not: import jax, or anything of rl_jax that does.
"""

import difflib
import faulthandler
import importlib
import inspect
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, BinaryIO

from rl_jax.child import die_with
from rl_jax.rewards.check import checked
from rl_jax.rollout import wire
from rl_jax.types import Message

TASKS_PER_LINE = 1000  # bounds a line's length
CLOSE_S = 2.0  # for instances to close after the driver has gone
# What an environment did not raise but returned is told apart from what it raised.
KINDS: dict[type, str] = {wire.BadTask: "bad_task", wire.BadObservation: "bad_observation"}
ENV_METHODS = ("tasks", "reset", "step", "close")
BACKSTOP_S = 10.0  # a request this much over its deadline ends the process, should the driver not be there to do it


class Worker:
    """The tables and instances of one process; answers requests."""

    def __init__(self, init: dict[str, Any]):
        self._max_obs_bytes = init["max_obs_bytes"]
        self._sources = {source["tag"]: source for source in init["sources"]}
        self._classes = {
            tag: _made(f"environment {source['env']}", lambda s=source: _environment(s["target"]))
            for tag, source in self._sources.items()
        }
        self._scorers = {
            name: _made(f"reward {name}", lambda n=name, t=target: _scorer(n, t, init))
            for name, target in init["scorers"].items()
        }
        self._tasks: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._live: dict[int, tuple[Any, Any]] = {}  # id -> (environment, task)
        self._scripts: dict[int, random.Random] = {}
        self._verbs = {
            "tasks": self._list_tasks,
            "reset": self._reset,
            "step": self._step,
            "script": self._script,
            "close": self._close,
            "score": self._score,
        }

    def offers(self) -> dict[str, Any]:
        """Of each tag the splits of its environment and whether it has scripts; which scorers score turns."""
        envs = {
            tag: {"splits": _splits(cls), "script": hasattr(cls, "script")}
            for tag, cls in self._classes.items()
        }
        of_turns = [name for name, s in self._scorers.items() if hasattr(s, "score_turn")]
        return {"envs": envs, "of_turns": sorted(of_turns)}

    def answer(self, request: dict[str, Any]) -> bytes:
        """The answer line: {"i", "r": result} or {"i", "x": [kind, detail]}. Raises nothing."""
        number, verb = request["i"], request["v"]
        # An environment's exit() is a fault of this episode, not of the others in the process.
        try:
            return wire.dumps({"i": number, "r": self._verbs[verb](request)})
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            kind = KINDS.get(type(error), "env_error")
            # What the checks say names the field; which line of theirs says it helps nobody.
            said = " ".join(str(error).split()) if type(error) in KINDS else error_line(error)
            detail = f"{verb}: {said}"
        if verb in ("reset", "step", "script"):
            self._discard(request["e"])
        return wire.dumps({"i": number, "x": [kind, detail]})

    def close(self) -> None:
        """Close every live instance."""
        for number in list(self._live):
            self._discard(number)

    def _list_tasks(self, request: dict[str, Any]) -> dict[str, Any]:
        key = (request["tag"], request["split"])
        if key not in self._tasks:
            source, cls = self._sources[key[0]], self._classes[key[0]]
            self._tasks[key] = _checked_tasks(cls.tasks(source["config"], key[1]), source, key[1])
        tasks, start = self._tasks[key], request["start"]
        return {"size": len(tasks), "tasks": tasks[start : start + TASKS_PER_LINE]}

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        number, task = request["e"], wire.task_from_wire(request["task"])
        self._discard(number)
        env = self._classes[task.tag]()
        self._live[number] = (env, task)
        return wire.step_to_wire(env.reset(task, request["seed"]), self._max_obs_bytes)

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        env, _ = self._live[request["e"]]
        result = env.step(wire.action_from_wire(request["a"]))
        return wire.step_to_wire(result, self._max_obs_bytes)

    def _script(self, request: dict[str, Any]) -> list[Any]:
        number = request["e"]
        env, task = self._live[number]
        if not hasattr(env, "script"):
            raise ValueError(f"environment {task.env!r} has no script(); set warm_start.steps=0")
        # One stream for the whole episode, from the seed of the first call.
        rng = self._scripts.setdefault(number, random.Random(request["seed"]))
        said = env.script(rng, request["skill"])
        if isinstance(said, str):
            said = Message("assistant", said)
        if not isinstance(said, Message) or said.role != "assistant":
            what = f"a message of {said.role}" if isinstance(said, Message) else type(said).__name__
            raise wire.BadObservation(f"returned {what}, no str and no message of the assistant")
        return wire.checked_message(said)

    def _close(self, request: dict[str, Any]) -> None:
        self._scripts.pop(request["e"], None)
        env, _ = self._live.pop(request["e"], (None, None))
        if env is not None:
            env.close()

    def _score(self, request: dict[str, Any]) -> list[Any]:
        task, view = wire.task_from_wire(request["task"]), wire.view_from_wire(request["view"])
        scorer = self._scorers[request["name"]]
        if "turn" in request:
            return wire.reward_to_wire(checked(scorer.score_turn(task, view, request["turn"])))
        return wire.reward_to_wire(checked(scorer.score(task, view)))

    def _discard(self, number: int) -> None:
        """Close an instance whose episode is over anyway; its complaint is only printed."""
        try:
            self._close({"e": number})
        except (Exception, SystemExit):
            traceback.print_exc()


class NotMade(Exception):
    """What a source names could not be imported or made."""


def _made(what: str, make: Callable[[], Any]) -> Any:
    """What make() gives. Raises NotMade, which says whose fault it was."""
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise NotMade(f"{what}: {error_line(error)}") from error


def _environment(target: str) -> type:
    """The class, which has what is called later. Raises: TypeError naming what it lacks."""
    cls = resolve(target)
    _check_methods(cls, target.partition(":")[2], ENV_METHODS)
    try:
        signature = inspect.signature(cls)
    except ValueError:
        return cls  # of C, which tells none
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            f"{cls.__qualname__}() {error}; an instance is made without arguments, and a task has all it needs"
        ) from None
    return cls


def _scorer(name: str, target: str, init: dict[str, Any]) -> Any:
    scorer = resolve(target)(**init["options"][name])
    needed = ["score_turn"] if name in init["of_turns"] else ["score"]
    _check_methods(scorer, type(scorer).__qualname__, needed)
    return scorer


def _check_methods(of: Any, name: str, needed: Sequence[str]) -> None:
    """Raises: TypeError where one is missing, or is a coroutine that nobody would await."""
    methods = {key: getattr(of, key, None) for key in needed}
    if missing := [key for key, method in methods.items() if not callable(method)]:
        raise TypeError(f"{name} has no {missing[0]}(); it needs {', '.join(needed)}")
    if is_async := [key for key, method in methods.items() if inspect.iscoroutinefunction(method)]:
        raise TypeError(f"{is_async[0]}() of {name} is async; write plain code, which may block")


def _splits(cls: Any) -> list[str]:
    splits = getattr(cls, "splits", ("train", "eval"))
    names = list(splits) if isinstance(splits, tuple | list) else []
    if not names or len({s for s in names if isinstance(s, str) and s}) != len(names):
        raise ValueError(
            f'splits of {cls.__qualname__} is {splits!r:.80}; use a tuple of names, as ("train", "eval")'
        )
    return names


def _checked_tasks(tasks: Any, source: dict[str, Any], split: str) -> list[dict[str, Any]]:
    """The tasks of a source's split as data. Raises wire.BadTask naming the first that cannot be played."""
    where = f"split {split!r} of {source['env']!r}"
    if not hasattr(tasks, "__len__") or not hasattr(tasks, "__getitem__"):
        raise wire.BadTask(
            f"{where}: tasks() returned {type(tasks).__name__}, which has no len() and [i]; use a list of Task"
        )
    tag, out = source["tag"], []
    for i in range(len(tasks)):
        try:
            task = wire.checked_task(tasks[i])
        except wire.BadTask as error:
            raise wire.BadTask(f"{where}: tasks()[{i}] {error}") from None
        named = {"env": source["env"], "tag": tag, "reward": source["reward"]}
        out.append(task | named | {"id": f"{tag}/{task['id']}"})
    num = Counter(task["id"] for task in out)
    twice = [f"{id_.removeprefix(tag + '/')!r}" for id_, n in num.items() if n > 1]
    if twice or not out:
        raise wire.BadTask(
            f"{where} has {len(out)} tasks with {len(num)} distinct ids"
            f"{' (twice: ' + ', '.join(twice[:3]) + ')' if twice else ''}; it needs at least one task, and an id of its"
            " own for each"
        )
    return out


def resolve(target: str) -> Any:
    """The object that "package.module:attribute" names. Raises: AttributeError with the nearest names there are."""
    name, _, attribute = target.partition(":")
    module = importlib.import_module(name)
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        there = [key for key in vars(module) if not key.startswith("_")]
        near = difflib.get_close_matches(attribute, there, n=1) or there
        raise AttributeError(
            f"{name} has no {attribute}; use {', '.join(near)[:200] or 'another module'}"
        ) from None


def error_line(error: BaseException) -> str:
    """Type, message and the innermost line of an exception, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})"
        if frames
        else ""
    )
    return " ".join(f"{type(error).__name__}: {error}{where}".split())[:800]


def serve(requests: BinaryIO, answers: int) -> None:
    """Answer requests until the end of `requests`. answers: a file descriptor."""
    line = requests.readline()
    if not line:
        return
    init = wire.loads(line)
    try:
        worker = Worker(init)
        ready = wire.dumps({"i": init["i"], "r": worker.offers()})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        said = str(error) if isinstance(error, NotMade) else error_line(error)
        _write(answers, wire.dumps({"i": init["i"], "x": ["env_import", said]}))
        return
    _write(answers, ready)
    while line := requests.readline():
        request = wire.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["t"] + BACKSTOP_S)
        answer = worker.answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, answer)
    worker.close()


def main() -> None:
    """Serve on the process's own stdin and stdout. --parent: a process, other than the driver, to die with."""
    for word in sys.argv[1:]:
        die_with(int(word.removeprefix("--parent=")))
    requests, answers = _take_pipes()
    faulthandler.enable()
    # The driver asks for the stack with this signal before it kills what hangs; C code in a loop answers too.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_end_with_driver, args=(requests.fileno(),), daemon=True).start()
    try:
        serve(requests, answers)
    except BrokenPipeError:
        pass  # the driver has gone between a request and its answer
    finally:
        sys.stderr.flush()
        _end_group()


def _take_pipes() -> tuple[BinaryIO, int]:
    """The pipes to the driver, moved away from where environments, or C code in them, could read or print."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(requests, "rb"), answers


def _end_with_driver(requests: int) -> None:
    """Ends the process group soon after the driver's end of the pipe is closed, whatever the main thread does."""
    poll = select.poll()
    poll.register(requests, 0)  # only POLLHUP
    poll.poll()
    time.sleep(CLOSE_S)
    _end_group()


def _end_group() -> None:
    """End this process and all it started. Only in a session of its own: never what a shell started by hand."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
