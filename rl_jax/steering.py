"""Steering: what a person asks of a run while it runs, by its control file (control.py, tools/steer.py).

    pause | resume | stop | save | set KEY=VALUE

Owns: which commands wait, whether the run is paused, and the table of what may be changed. Life of a command:
1 `is_called` is asked between two steps and while the driver waits for a batch; it looks into the file every LOOK_S.
A wait that is interrupted so is begun again: its groups stay where they are.
2 `between` obeys what has come, in order, before a step, and answers each with one event `steer` (seq, who, sent, verb,
key, old, new, step, answer done | refused, why) and one line. Never within a step: a step sees one set of settings.
3 While paused it stays there: no step begins, and no batch is waited for, so no deadline runs. Everything else lives:
servers, workers, learner, heartbeats and leases; episodes go on until rollout.max_staleness lets no new one start. A
signal ends a pause as it ends a run, with a save; so does `stop`.
stop ends the run as its last step does: evaluation, save, summary, exit code 0.
A changed value is in the checkpoint with the one that it took the place of. A resume keeps it as long as its config
says the old one; a config that says something else has been changed since, and wins.
Must not: change what is compiled, what a checkpoint depends on, or what another part has copied.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rl_jax import schema
from rl_jax.control import VERBS, Command, Reader
from rl_jax.rollout.bound import ADAPTIVE
from rl_jax.settings import Settings

LOOK_S = 0.5  # between two looks into the file
PAUSE_S = 0.1  # between two looks at what ends a pause

# What may be changed -> why that is safe; a name ending in "." stands for all below it.
STEERABLE: Mapping[str, str] = {
    "steps": "only the loop's end and the admission of the last groups read it, at constant learning rates",
    "eval.every": "read between two steps",
    "checkpoint.every": "read between two steps",
    "rollout.max_staleness": "admission and sweep take a bound between two steps; never above what the run began with",
    "metrics.rollouts_every": "read after each step",
    "guards.": "the guards of the next step are made anew",
}
# What may not, with why: the first that fits.
FIXED: Mapping[str, str] = {
    "learner.": "it is compiled into the learner's step",
    "algorithm.": "it is compiled into the learner's step, or part of its state",
    "critic.": "it is compiled into the critic's step",
    "model.": "it is what the weights are",
    "engine.": "it is compiled into the servers' programs",
    "mesh.": "it is where programs were compiled for",
    "seed": "what was drawn with it has been trained on",
}


class Steered(Protocol):
    """The driver, as far as it is steered."""

    settings: Settings
    state: Any  # driver.DriverState: `version`, the last step that was done, and `steered` are used

    def save(self) -> None: ...
    def change(self, settings: Settings, key: str) -> None: ...
    def is_stopping(self) -> bool: ...


class Steering:
    """Of one run; the driver's thread alone calls it."""

    def __init__(
        self,
        reader: Reader,
        recorder: Any,  # rl_jax.recorder.Recorder
        check: Callable[[Settings], list[str]],
        mode: str,
        most_staleness: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """check: what is wrong with settings, a line each. most_staleness: what the run began with."""
        self._reader, self._recorder, self._check = reader, recorder, check
        self._mode, self._most, self._clock, self._sleep = mode, most_staleness, clock, sleep
        self._waiting: list[Command] = []
        self._looked_s = -LOOK_S
        self._paused_by: Command | None = None
        self.paused_s = 0.0  # of all pauses since this was set to 0

    def begin(self, driver: Steered) -> None:
        """What was steered before a resume holds on (kept_changes)."""
        settings, kept, lines = kept_changes(driver.settings, driver.state.steered, self._check)
        driver.state.steered = kept
        for key in kept:
            driver.change(settings, key)
        for line in lines:
            self._recorder.progress.note(line)

    def is_called(self) -> bool:
        """Whether a command waits for `between`."""
        now = self._clock()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            self._waiting += self._reader.poll()
        return bool(self._waiting)

    def between(self, driver: Steered, step: int) -> bool:
        """Obey what waits, before `step`; stays here while the run is paused. False: the run shall end now."""
        while True:
            self.is_called()
            while self._waiting:
                if not self._obey(driver, self._waiting.pop(0)):
                    return False
            if self._paused_by is None or driver.is_stopping():
                return True
            self._pause(driver, step)

    @property
    def is_paused(self) -> bool:
        """Any thread."""
        return self._paused_by is not None

    def refuse_rest(self, why: str) -> None:
        """The run ends: what came too late is told so."""
        self._looked_s = -LOOK_S
        self.is_called()
        for command in self._waiting:
            self._answer(command, 0, why=why)
        self._waiting = []

    def _pause(self, driver: Steered, step: int) -> None:
        paused, start_s = self._paused_by, self._clock()
        assert paused is not None, "whoever pauses says who asked"
        what = f"a pause before step {step}, asked for by {paused.who}"
        remedy = lambda: "python -m rl_jax.tools.steer RUN resume ends it"
        self._recorder.status("paused", step=driver.state.version)
        with self._recorder.doing(what, remedy):
            while not (self.is_called() or driver.is_stopping()):
                self._sleep(PAUSE_S)
        self.paused_s += self._clock() - start_s
        self._recorder.status("running", step=driver.state.version)

    def _obey(self, driver: Steered, command: Command) -> bool:
        """False: the run shall end."""
        step, verb = driver.state.version, command.verb
        if command.wrong or verb not in VERBS:
            known = ", ".join(VERBS)
            self._answer(command, step, why=command.wrong or f"no verb {verb!r}; there are {known}")
        elif verb == "pause":
            if self._paused_by is not None:
                self._answer(command, step, why=f"it is paused already, by {self._paused_by.who}")
            else:
                self._paused_by = command
                self._recorder.status("paused", step=step)  # before the answer, which is a promise
                self._answer(command, step)
        elif verb == "resume":
            why = "" if self._paused_by is not None else "it is not paused"
            self._paused_by = None
            if not why:
                self._recorder.status("running", step=step)
            self._answer(command, step, why=why)
        elif verb == "save":
            driver.save()
            self._answer(command, step)
        elif verb == "set":
            self._set(driver, command)
        else:
            self._paused_by = None
            self._answer(command, step)
            return False
        return True

    def _set(self, driver: Steered, command: Command) -> None:
        settings, key, step = driver.settings, command.key, driver.state.version
        old = schema.leaves(schema.to_tree(settings)).get(key)
        changed, why = changed_settings(settings, key, command.value)
        if not why:
            assert changed is not None, "without a reason against it there is a change"
            before = set(self._check(settings))
            wrong = [line for line in self._check(changed) if line not in before]
            why = "; ".join(wrong) or self._unsafe(changed, key, step)
        if why:
            self._answer(command, step, why=why)
            return
        driver.state.steered = noted(driver.state.steered, settings, changed, key)
        driver.change(changed, key)
        self._answer(command, step, old=old, new=schema.leaves(schema.to_tree(changed))[key])

    def _unsafe(self, changed: Settings, key: str, step: int) -> str:
        """What no check of a config knows."""
        if key == "steps" and changed.steps <= step:
            return f"step {step} is done already; stop ends the run now"
        if key == "steps" and self._mode == "train_only":
            return "the saved steps are replayed, as many as it began with"
        if key == "steps" and changed.learner.schedule != "constant":
            return f"learner.schedule={changed.learner.schedule} is over `steps`, and compiled"
        if key == "rollout.max_staleness":
            if changed.rollout.staleness_policy == ADAPTIVE:
                return "rollout.staleness_policy=adaptive chooses the bound itself"
            if changed.rollout.max_staleness > self._most:
                return f"the run began with {self._most}, for which its buffers are; a resume may have more"
        return ""

    def _answer(self, command: Command, step: int, why: str = "", **changed: Any) -> None:
        answer = "refused" if why else "done"
        what = " ".join(
            [command.verb or "a line", *([f"{command.key}={command.value}"] if command.key else [])]
        )
        who = command.who or "somebody"
        self._recorder.event(
            "steer", seq=command.seq, who=command.who, sent=command.time, verb=command.verb,
            key=command.key, asked=command.value, step=step, answer=answer, why=why, **changed,
        )  # fmt: skip
        self._recorder.progress.note(
            f"steer  {what} by {who}: {answer}" + (f": {why}" if why else f", after step {step}"),
            seq=command.seq,
            answer=answer,
        )


def changed_settings(settings: Settings, key: str, value: Any) -> tuple[Settings | None, str]:
    """The settings with one value changed, as far as STEERABLE allows, else why not."""
    tree = schema.to_tree(settings)
    if key not in schema.leaves(tree):
        return None, f"no setting {key!r}"
    if not any(key == name or (name[-1] == "." and key.startswith(name)) for name in STEERABLE):
        why = next((why for name, why in FIXED.items() if key.startswith(name)), "")
        may = ", ".join(name + "*" * name.endswith(".") for name in STEERABLE)
        return None, (
            f"{key} cannot change in a run" + (f": {why}" if why else "") + f"; {may} can"
        )
    *sections, last = key.split(".")
    part = tree
    for section in sections:
        part = part[section]
    part[last] = value
    errors: list[str] = []
    changed = schema.build(Settings, tree, "", errors)
    return (None, "; ".join(errors)) if errors else (changed, "")


def kept_changes(
    settings: Settings, steered: Mapping[str, Any], check: Callable[[Settings], list[str]]
) -> tuple[Settings, dict[str, Any], list[str]]:
    """The settings of a resume with what was steered before it, as `steered` of the checkpoint holds it: key -> [old,
    new]; what of it holds on; and a line each."""
    kept, lines = {}, []
    for key, (old, new) in steered.items():
        now = schema.leaves(schema.to_tree(settings)).get(key)
        changed, why = changed_settings(settings, key, new)
        if now == old and changed is not None and not set(check(changed)) - set(check(settings)):
            settings, kept[key] = changed, [old, new]
            lines.append(f"steered before: {key}={new} in place of {old}, as then")
        else:
            lines.append(
                f"steered before: {key}={new} in place of {old}, and no more: it is {now} now"
                + (f" ({why})" if why else "")
            )
    return settings, kept, lines


def noted(steered: Mapping[str, Any], before: Settings, after: Settings, key: str) -> dict:
    """`steered` of the checkpoint once `key` was changed."""
    was, now = (schema.leaves(schema.to_tree(s))[key] for s in (before, after))
    first = steered[key][0] if key in steered else was
    others = {name: value for name, value in steered.items() if name != key}
    return others if now == first else {**others, key: [first, now]}
