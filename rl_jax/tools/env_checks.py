"""What an environment must do before it is trained on, checked from outside as a run would play it.

Owns: the checks and what they found (Report). Invariants: the environment lives in real worker processes and only
there, so what hangs or dies in it is killed and told; every wait ends by a deadline; a fault is told once, with how
often it was met. Two pools of one worker each are used, `here` and `there`: what two processes tell
differently does not follow from task and seed.

Order: tasks (both pools list them) -> play (random and scripted policies, a model where one is named) -> determinism
(the same actions there, and here beside another episode) -> hostile text -> close. Where no episode can begin, the rest
is not tried.
Must not: import an environment, or judge how hard it is.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_jax.rewards.check import NoReward, finite, from_steps
from rl_jax.rollout import wire
from rl_jax.rollout.worker import EnvError, EnvHandle, EnvPool
from rl_jax.settings import RewardSettings, RolloutSettings, TaskSource
from rl_jax.tools.openai_policy import OpenAIPolicy, PolicyError
from rl_jax.types import Action, EpisodeView, Message, StepResult, Task, ToolCall

SEED = 12345
NUM_TASKS = 4  # of each split that are played; of the others only the beginning is looked at
MAX_BEGINNINGS = 64  # of each split, to compare the splits
COMPARE_S = 30.0  # for those beginnings
MAX_TURNS = 64  # of an episode that is played here
MAX_DEATHS = (
    2  # hangs and dead workers after which no further episode is played: each costs a deadline
)

HOSTILE: Mapping[str, str] = {
    "empty text": "",
    "blank text": " \t\r\n",
    "control characters": "\x00\x07\x1b[31m\x7f\x85",
    "a lone surrogate": "\ud835",
    "names of special tokens": "<|end|><|im_end|><|assistant|></s><eos>[/INST]",
    "1 MB of text": "x" * 1_000_000,
    "text of other scripts": "٣² Ⅷ 漢字 💥 ‮abc",
    "an unfinished JSON": '{"a": [1, {"b": NaN',
    "huge numbers": "9" * 5000 + " 1e999 -0 nan inf",
    "a format string": "%s %n {0} {x.__class__} $(reboot)",
}
REMEDIES = {
    "env_timeout": "make it faster, or raise the setting",
    "env_died": "nothing an action says may end the process; run what may crash in a process of its own",
    "env_error": "catch it, and answer the policy in words",
    "bad_observation": "return what the message names",
}


@dataclass
class Fault:
    check: str
    detail: str
    remedy: str
    count: int = 1


@dataclass
class Report:
    """What was found; `add` is told of everything, and keeps one fault of each kind."""

    env: str
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tasks: dict[str, int] = field(default_factory=dict)  # by split
    num_episodes: int = 0
    times_s: dict[str, list[float]] = field(
        default_factory=lambda: {"reset": [], "step": [], "close": []}
    )

    def add(self, check: str, kind: str, detail: str, remedy: str = "") -> None:
        fault = self.faults.get((check, kind))
        if fault is not None:
            fault.count += 1
            return
        self.faults[check, kind] = Fault(check, " ".join(detail.split()), remedy or REMEDIES[kind])

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def as_json(self) -> dict[str, Any]:
        longest = {name: max(values, default=0.0) for name, values in self.times_s.items()}
        return {
            "env": self.env,
            "faults": [vars(fault) for fault in self.faults.values()],
            "notes": self.notes,
            "tasks": self.tasks,
            "episodes": self.num_episodes,
            "longest_s": longest,
        }


@dataclass(frozen=True)
class Played:
    """One episode: what was said to it, and its answers (the first is reset()'s)."""

    task: Task
    actions: tuple[Action, ...]
    answers: tuple[StepResult, ...]

    @property
    def reward(self) -> float:
        return sum(finite(answer.reward) or 0.0 for answer in self.answers[1:])

    @property
    def view(self) -> EpisodeView:
        """What a run would let a scorer see of it."""
        first, *others = self.answers
        said, info = [*self.task.messages, *first.messages], {}
        for action, answer in zip(self.actions, others):
            said += [Message("assistant", action.text), *answer.messages]
            info |= answer.info
        texts = tuple(action.text for action in self.actions)
        return EpisodeView(tuple(said), texts, info, tuple(answer.reward for answer in others))


class Ended(Exception):
    """An episode that a fault ended; the report has it."""


class Checker:
    """Runs all checks of one task source."""

    def __init__(
        self,
        source: TaskSource,
        settings: RolloutSettings,
        rewards: RewardSettings,
        model: OpenAIPolicy | None = None,
    ):
        """model: plays each task of train that the random policy plays."""
        self._model = model
        self.report = Report(source.env)
        self._source = source
        self._here, self._there = (EnvPool([source], settings, rewards) for _ in range(2))
        self._settings = settings
        self._num_opened = 0

    async def run(self) -> Report:
        try:
            if await self._start():
                played = await self._play()
                if played:
                    await self._deterministic(played)
                    await self._hostile(played[0].task)
                    await self._close(played[0].task)
        finally:
            await asyncio.gather(self._here.close(), self._there.close())
            if self._model is not None:
                await self._model.close()
        return self.report

    # --- the checks ---------------------------------------------------------------------------------------------------

    async def _start(self) -> bool:
        """Import and tasks; whether anything can be played."""
        try:
            for pool in (self._here, self._there):
                await pool.start()
        except EnvError as error:
            remedies = {
                "env_import": "mend the module, or its name",
                "env_timeout": "make import and tasks() faster, or raise rollout.start_timeout_s",
            }
            remedy = remedies.get(error.kind, "mend tasks(), or the config")
            self.report.add("start", error.kind, f"{error.kind}: {error.detail}", remedy)
            return False
        tag, ids = self._source.tag, dict[str, str]()
        for split in self._here.splits(tag):
            tasks = self._here.list_tasks(tag, split)
            self.report.tasks[split] = len(tasks)
            if tasks != self._there.list_tasks(tag, split):
                told = f"tasks() of split {split!r} differs between two processes"
                self.report.add("tasks", "differ", told, "make it depend on the config alone")
            for task in tasks:
                if ids.setdefault(task.id, split) != split:
                    own = task.id.removeprefix(tag + "/")
                    told = f"task id {own!r} is in the splits {ids[task.id]!r} and {split!r}"
                    self.report.add("tasks", "ids", told, "put the split's name into the id")
        if "train" not in self.report.tasks:
            told = f"the splits are {', '.join(self.report.tasks)}, without train"
            self.report.add("tasks", "train", told, 'name "train" among `splits`')
        await self._compare_splits()
        return True

    async def _compare_splits(self) -> None:
        """Some held-out split must hold no problem of train; a problem is what is asked, with the hidden payload."""
        problems: dict[str, dict[str, set[str]]] = {}
        end_s = time.monotonic() + COMPARE_S
        for split in self.report.tasks:
            tasks = self._here.list_tasks(self._source.tag, split)
            problems[split] = {}
            for task in tasks[:: max(1, len(tasks) // MAX_BEGINNINGS)]:
                if time.monotonic() > end_s and problems[split]:
                    self.report.note(
                        f"resets are slow: not all splits were compared in {COMPARE_S:g} s"
                    )
                    break
                try:
                    first = (await self._episode(self._here, task, [], "reset")).answers[0]
                except Ended:
                    return  # told, and nothing can be compared
                asked = json.dumps(
                    [wire.message_to_wire(m) for m in (*task.messages, *first.messages)]
                )
                payloads = problems[split].setdefault(asked, set())
                payloads.add(json.dumps(wire.task_to_wire(task)["payload"], sort_keys=True))
        train, shared = problems.get("train", {}), {}
        held_out = [split for split in problems if split != "train"]
        for split in held_out:
            alike = [asked for asked in problems[split] if asked in train]
            same = [asked for asked in alike if problems[split][asked] & train[asked]]
            shared[split] = len(same)
            if alike and not same:
                self.report.note(
                    f"{len(alike)} beginnings of split {split!r} are train's too, with other payloads: what differs"
                    " is not seen at the beginning"
                )
        if held_out and train and all(shared.values()):
            told = ", ".join(f"{num} of {split!r}" for split, num in shared.items())
            remedy = "draw the held-out tasks from what train leaves"
            self.report.add("tasks", "shared", f"problems that train has too: {told}", remedy)
        elif any(shared.values()):
            told = ", ".join(split for split, num in shared.items() if num)
            self.report.note(f"split {told} holds problems of train; evaluate on another, too")

    async def _play(self) -> list[Played]:
        """Random and scripted episodes. Returns those of the random policy that came to an end."""
        played, scripted = [], {0.0: list[Played](), 1.0: list[Played]()}
        for split in self.report.tasks:
            for task in self._some(split):
                if self._num_deaths() >= MAX_DEATHS:
                    break
                rng = random.Random(f"{SEED}/{task.id}")
                try:
                    played.append(await self._episode(self._here, task, rng, "random policy"))
                except Ended:
                    continue
                if split == "train" and self._here.has_script(self._source.tag):
                    for skill, ended in scripted.items():
                        try:
                            ended.append(await self._episode(self._here, task, skill, "script"))
                        except Ended:
                            pass
        self._judge_rewards(played, scripted)
        if self._model is not None:
            await self._play_model(self._model)
        for one in played:
            await self._judge_score(one)
            if ("reward", "timeout") in self.report.faults:
                break  # each more would cost its deadline
        return played

    async def _play_model(self, model: OpenAIPolicy) -> None:
        """What a model behind an endpoint makes of the tasks that a run would train on."""
        ended: list[Played] = []
        for task in self._some("train") if "train" in self.report.tasks else ():
            try:
                await model.check()
                ended.append(await self._episode(self._here, task, model, "openai policy"))
            except Ended:
                continue
            except PolicyError as error:
                remedy = "see that it serves chat completions of this model, with tools if the tasks have any"
                self.report.add("openai policy", "endpoint", f"{model.model}: {error}", remedy)
                return
        if ended:
            mean = sum(one.reward for one in ended) / len(ended)
            done = sum(one.answers[-1].done for one in ended)
            self.report.note(
                f"openai policy {model.model}: {len(ended)} episodes in {model.num_answers} turns, {done} came to done,"
                f" mean reward of their steps {mean:g}"
            )

    def _num_deaths(self) -> int:
        deadly = ("env_timeout", "env_died")
        return sum(f.count for (_, kind), f in self.report.faults.items() if kind in deadly)

    def _judge_rewards(
        self, played: Sequence[Played], scripted: Mapping[float, list[Played]]
    ) -> None:
        if self._source.reward == "env":
            if played and not any(one.reward for one in (*played, *scripted[1.0])):
                self.report.note(
                    f"no episode of {len(played) + len(scripted[1.0])} got a reward other than 0, scripts with full"
                    " skill included: zeros are trained on as failures of the policy"
                )
            best, worst = (sum(o.reward for o in scripted[s]) for s in (1.0, 0.0))
            is_fair = len(scripted[1.0]) == len(scripted[0.0]) > 0
            if is_fair and best <= worst and (best or worst):  # luck may leave both with nothing
                told = f"its script earns {best:g} with skill 1 and {worst:g} with skill 0"
                self.report.add("script", "skill", told, "let script(rng, 1.0) solve the task")
        if scripted[1.0] and not any(one.answers[-1].done for one in scripted[1.0]):
            told = "no episode of its script with skill 1 came to done within max_turns"
            self.report.add("script", "done", told, "raise max_turns, or say done=True at the end")

    async def _judge_score(self, one: Played) -> None:
        """The reward of the whole episode, as a run would give it."""
        if self._source.reward == "env":
            return  # judged step by step
        reward = (await self._here.score(self._source.reward, one.task, one.view)).reward
        if reward.status != "scored":
            told = f"{self._source.reward} gave status {reward.status}: {reward.detail}"
            self.report.add(
                "reward", reward.status, told, "give a finite number, within rewards.timeout_s"
            )

    async def _deterministic(self, played: Sequence[Played]) -> None:
        """The same actions give the same answers in another process, and beside another episode in this one."""
        for one in played[:NUM_TASKS]:
            try:
                again = await self._episode(self._there, one.task, one.actions, "the same again")
                self._compare(
                    one, again, "process", "in another process", "its clock, process or memory"
                )
                beside = played[-1].task if one is not played[-1] else played[0].task
                mixed = await self._episode(
                    self._here, one.task, one.actions, "beside another", beside
                )
                remedy = "the process (a global, the shared generator of `random`): keep it in the instance"
                self._compare(one, mixed, "beside", "beside another episode", remedy)
            except Ended:
                pass

    def _compare(self, one: Played, other: Played, kind: str, where: str, hint: str) -> None:
        for i, (a, b) in enumerate(zip(one.answers, other.answers)):
            # What the text is made of, and what is trained on; a NaN of the reward is told elsewhere.
            said = [
                (r.messages, finite(r.reward), r.done, r.to_agent, r.new_context, dict(r.info))
                for r in (a, b)
            ]
            if said[0] != said[1]:
                what = "reset()" if i == 0 else f"step {i}"
                told = f"task {one.task.id}, seed {SEED}: {what} answers otherwise {where}"
                self.report.add("determinism", kind, told, f"let nothing depend on {hint}")
                return

    async def _hostile(self, task: Task) -> None:
        for name, text in HOSTILE.items():
            actions = [Action(text)]
            actions += [Action("", (call,)) for call in _calls(task, text)]
            for action in actions:
                try:
                    await self._episode(self._here, task, [action], f"hostile text ({name})")
                except Ended:
                    break

    async def _close(self, task: Task) -> None:
        """In the middle of an episode, and by an episode that nobody plays."""
        for actions in ([], [Action("x")]):
            try:
                await self._episode(self._here, task, actions, "close")
            except Ended:
                pass

    # --- one episode --------------------------------------------------------------------------------------------------

    async def _episode(
        self, pool: EnvPool, task: Task, policy: Any, check: str, beside: Task | None = None
    ) -> Played:
        """Play and close it. policy: a Random (random texts), a skill of the script, a model, or a sequence of actions.

        beside: of an episode that is reset in the same process before each step. Raises: Ended; PolicyError of a model.
        """
        actions: list[Action] = []
        answers: list[StepResult] = []
        handle = await self._open(pool, task, check)
        try:
            answers.append(await self._timed("reset", handle.reset()))
            self._judge_first(task, answers[0])
            while not answers[-1].done and len(actions) < min(task.max_turns, MAX_TURNS):
                if beside is not None:
                    await self._disturb(pool, beside)
                action = await self._next(handle, policy, len(actions), task, answers[-1])
                if action is None:
                    break
                actions.append(action)
                answers.append(await self._timed("step", handle.step(action)))
                self._judge_step(task, answers[-1], len(actions), is_huge=len(action.text) > 10_000)
        except EnvError as error:
            if "script: LookupError" in error.detail:
                self.report.note("it has no script for these tasks: no warm start")
            elif error.kind != "env_lost":
                remedy = REMEDIES.get(error.kind, "mend what the message names")
                self.report.add(
                    check.partition(" (")[0], error.kind, f"{check}: {error.detail}", remedy
                )
            raise Ended from None  # and its environment is closed
        except PolicyError:
            await self._shut(pool, handle)
            raise
        await self._shut(pool, handle)
        self.report.num_episodes += 1
        return Played(task, tuple(actions), tuple(answers))

    async def _open(self, pool: EnvPool, task: Task, check: str) -> EnvHandle:
        self._num_opened += 1
        try:
            return await pool.open(task, f"{check.replace(' ', '_')}/{self._num_opened}", SEED)
        except EnvError as error:
            self.report.add(check, error.kind, error.detail, "mend what ended its workers before")
            raise Ended from None

    async def _disturb(self, pool: EnvPool, task: Task) -> None:
        other = await self._open(pool, task, "beside")
        await other.reset()
        await self._shut(pool, other)

    async def _shut(self, pool: EnvPool, handle: EnvHandle) -> None:
        num_failed, begin_s = pool.counts["close_failed"], time.monotonic()
        await handle.close()
        self.report.times_s["close"].append(time.monotonic() - begin_s)
        if pool.counts["close_failed"] > num_failed:
            limit = f"rollout.step_timeout_s={self._settings.step_timeout_s:g}"
            told = f"close() raised, died or took more than {limit}"
            self.report.add(
                "close", "close_failed", told, "let close() free what it can and raise nothing"
            )

    async def _timed(self, name: str, call: Any) -> StepResult:
        begin_s = time.monotonic()
        result = await call
        self.report.times_s[name].append(time.monotonic() - begin_s)
        return result

    async def _next(
        self, handle: EnvHandle, policy: Any, i: int, task: Task, seen: StepResult
    ) -> Action | None:
        if isinstance(policy, random.Random):
            return _random_action(policy, task, seen)
        if isinstance(policy, float):
            said = await handle.script(SEED, policy)
            return Action(said.content, said.tool_calls)
        if isinstance(policy, OpenAIPolicy):
            return await policy.act(i, task, seen)
        return policy[i] if i < len(policy) else None

    # --- one answer ---------------------------------------------------------------------------------------------------

    def _judge_first(self, task: Task, first: StepResult) -> None:
        if first.done:
            self.report.add(
                "reset", "done", f"task {task.id}: reset() says done", "say it from step()"
            )
        if first.reward is not None:
            told = f"task {task.id}: reset() gives a reward, which nobody reads"
            self.report.add("reset", "reward", told, "give it from step()")
        if not any(m.content for m in (*task.messages, *first.messages)):
            told = f"task {task.id}: neither the task's messages nor reset() say anything"
            self.report.add("reset", "nothing", told, "begin the conversation with a message")
        self._judge_size(task, first, "reset()")

    def _judge_step(self, task: Task, seen: StepResult, number: int, is_huge: bool) -> None:
        if not is_huge:  # an environment may repeat what was said to it
            self._judge_size(task, seen, f"step {number}")
        value = seen.reward
        if isinstance(value, NoReward) or (self._source.reward == "env" and finite(value) is None):
            detail = (
                from_steps([value]).detail.partition("; ")[0].replace("step 0", f"step {number}")
            )
            remedy = (
                "a finite float from every step(), 0.0 for none; None only where a scorer is named"
            )
            self.report.add("reward", "step", f"task {task.id}: {detail}", remedy)

    def _judge_size(self, task: Task, seen: StepResult, what: str) -> None:
        cut = seen.info.get("truncated_bytes", 0.0)
        if cut:
            limit = f"rollout.max_obs_bytes={self._settings.max_obs_bytes}"
            told = f"task {task.id}: {what} says {cut:.0f} bytes more than {limit}, which are cut"
            self.report.add("observation", "size", told, "say less, or raise it")

    def _some(self, split: str) -> tuple[Task, ...]:
        tasks = self._here.list_tasks(self._source.tag, split)
        return tasks[:: max(1, len(tasks) // NUM_TASKS)][:NUM_TASKS]


def _random_action(rng: random.Random, task: Task, seen: StepResult) -> Action:
    """What an untrained policy may say: a letter, a number, a word of what it saw, a sentence; or a call."""
    if task.tools and rng.random() < 0.5:
        calls = _calls(task, str(rng.randint(-9, 99)))
        return Action("", (rng.choice(calls),))
    words = " ".join(message.content[:2000] for message in seen.messages).split() or ["yes"]
    choices = (
        rng.choice("ABCDLRU0123456789"),
        str(rng.randint(-9, 99)),
        rng.choice(words),
        f"I think it is {rng.choice(words)}. Answer: {rng.randint(0, 9)}",
    )
    return Action(rng.choice(choices))


def _calls(task: Task, text: str) -> list[ToolCall]:
    """A call of each tool whose arguments have the types that its schema asks for, strings being the text."""
    out = []
    for tool in task.tools:
        function = tool.get("function", tool)
        schema = function.get("parameters", {}).get("properties", {})
        samples: dict[str, Any] = {
            "integer": 7,
            "number": 0.5,
            "boolean": True,
            "array": [],
            "object": {},
        }
        values = {name: samples.get(str(of.get("type")), text) for name, of in schema.items()}
        out.append(ToolCall(str(function.get("name", "")), values))
    return out
