"""What a policy asked for, held against what its View says exists; and for how long it asks for nothing.

Owns: the sentences about a policy. What it names that does not exist (a task's tag, a group, an episode), an answer of
another form, and an error of its own end the run at once (SchedulerError), since none of them can come right by itself.
What it asks for beyond what is there (slots, members of a group, groups that the buffer holds) is cut to what is there
by dispatcher.py and slots.py, and named, once a kind in full (console.py). A tag that it leaves short while slots are
free and nothing is trained is a Wait, which the watchdog names (waits.py) and rollout.take_timeout_s ends.
Invariants: pure but for `Shortfalls`; a policy that keeps to its View is never named.
Must not: change what was asked, or read a clock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rl_jax.rollout.scheduler import SchedulerConfig
from rl_jax.types import Cancel, Drop, NeedBatch, SchedulerAction, Start, View
from rl_jax.waits import Wait

SAID_MOST = 200  # characters of a foreign object's repr


class SchedulerError(RuntimeError):
    """A policy did what no run can go on with."""


def checked(name: str, answer: Any, view: View, rules: SchedulerConfig) -> tuple[Any, list[Any]]:
    """The (state, actions) of decide(). name: rollout.scheduler. Raises: SchedulerError."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and _is_list(answer[1])):
        raise _wrong(name, f"answered {_said(answer)}", "return (state, list of actions)")
    state, actions = answer
    groups = {group.group for group in view.groups}
    for action in actions:
        match action:
            case Start(group, int() as members, tag) if members > 0:
                _check_start(name, group, tag, groups, rules)
            case Start():
                raise _wrong(name, f"asked for {_said(action)}", "start 1 member or more")
            case Drop(group, str()):
                _check_group(name, group, groups, action)
            case Cancel(str() as uid, str()):
                _check_group(name, uid.rpartition("/")[0], groups, action)
                if not uid.rpartition("/")[2].isdecimal():
                    raise _wrong(name, f"asked for {_said(action)}", "an episode is GROUP/SAMPLE")
            case _:
                raise _wrong(name, f"asked for {_said(action)}", "use Start, Cancel or Drop")
    return state, list(actions)


def no_episode(name: str, uid: str) -> SchedulerError:
    """What to raise where a Cancel is of no episode that runs."""
    return _wrong(
        name, f"cancelled {uid}, which does not run", "cancel what was started and has not ended"
    )


def tried(name: str, policy: Any, rules: SchedulerConfig, need_groups: int) -> None:
    """Ask a policy once, as at the first batch, with nothing in flight. Raises: SchedulerError."""
    free = {"": need_groups * rules.group_size}
    view = View(0.0, 0, 1, need_groups, free, (), 0, 0)
    try:
        answer = policy.decide(policy.init(rules), view, NeedBatch(1))
    except Exception as error:  # the boundary to a plugin
        raise raised(name, "its first decision", error) from error
    checked(name, answer, view, rules)


def raised(name: str, call: str, error: Exception) -> SchedulerError:
    """What to raise, from an error of the policy's own."""
    what = f"raised {type(error).__name__} in {call}: {error}"
    return _wrong(name, what, "mend it, or use another rollout.scheduler")


def excess(actions: Sequence[SchedulerAction], view: View, rules: SchedulerConfig) -> list[str]:
    """What is asked for beyond what exists: what, the number, and the limit; [] where all is there. Of actions that
    `checked` let through. A group of any tag's task (its limit is not known before) is held against slots alone."""
    starts = [action for action in actions if isinstance(action, Start)]
    free = sum(view.free.values()) if view.room is None else min(view.room, sum(view.free.values()))
    found = []
    if (num := sum(start.members for start in starts)) > free:
        found.append(f"{num} episodes at once, and {free} slots are free")
    size = rules.group_size + rules.extra_members
    missing = {g.group: g.want + g.extra - g.started for g in view.groups}
    sources = {group.group: group.source for group in view.groups}
    of_tag: Counter[str] = Counter()
    for start in starts:
        where = f"a new group of {start.tag}" if start.group is None else f"group {start.group}"
        most = size if start.group is None else missing[start.group]
        if start.members > most:
            found.append(f"{start.members} members of {where}, which has room for {most}")
        if start.group is not None:
            missing[start.group] -= start.members
        of_tag[sources.get(start.group or "") or start.tag] += start.members
    for tag, limit in view.limits.items():
        if of_tag[tag] > limit:
            found.append(f"{of_tag[tag]} episodes of {tag}, whose max_live leaves room for {limit}")
    return found


class Shortfalls:
    """For each tag since when the policy leaves it short. `look` after every event, on one thread; `waits` on any."""

    def __init__(self, name: str, rules: SchedulerConfig, limit: str):
        """limit: the setting that ends such a wait, with its value."""
        self._name, self._rules, self._limit = name, rules, limit
        self._waits: dict[str, Wait] = {}

    def look(self, view: View, at_s: float) -> None:
        """at_s: clock.now_s()."""
        waits = {}
        for tag in self._rules.tags:
            if text := self._short(view, tag):
                before = self._waits.get(tag)
                waits[tag] = Wait(
                    f"rollout.scheduler={self._name} starts nothing of {tag}",
                    at_s if before is None else before.since_s,
                    self._limit,
                    text,
                )
        self._waits = waits

    def end(self) -> None:
        """Nothing is to be started any more."""
        self._waits = {}

    def waits(self) -> list[Wait]:
        return list(self._waits.values())

    def _short(self, view: View, tag: str) -> str:
        """What there is and what is wanted, where the tag is short and could start; "" otherwise."""
        share = view.need_groups // len(self._rules.tags)
        if view.taken or view.batches_left == 0 or not share:
            return ""
        flying = [group for group in view.groups if group.tag == tag and not group.deferred]
        has = view.held.get(tag, 0) + len(flying)
        lacks = sum(max(0, group.want - group.started) for group in flying)
        free = min(sum(view.free.values()), view.limits.get(tag, sum(view.free.values())))
        free = free if view.room is None else min(free, view.room)
        if free <= 0 or (has >= share and not (lacks and not _is_played(flying))):
            return ""
        return (
            f"though step {view.step} needs {share} groups of it, {has} are here, {lacks} of their episodes are"
            f" missing, and {free} slots are free"
        )


def _is_played(groups: Sequence[Any]) -> bool:
    """Whether any of their episodes runs."""
    return any(group.started > group.scored for group in groups)


def _check_start(name: str, group: Any, tag: str, groups: set[str], rules: SchedulerConfig) -> None:
    if group is None:
        if tag not in rules.tags:
            what = (
                f"started a group of {_said(tag)}, and the tasks' tags are {', '.join(rules.tags)}"
            )
            raise _wrong(name, what, "start groups of SchedulerConfig.tags")
    else:
        _check_group(name, group, groups, f"start members of {_said(group)}")


def _check_group(name: str, group: Any, groups: set[str], asked: Any) -> None:
    if group not in groups:
        said = asked if isinstance(asked, str) else _said(asked)
        what = f"asked for {said}, and there is no such group among the {len(groups)} in flight"
        raise _wrong(name, what, "name groups of View.groups, as they are at this event")


def _wrong(name: str, what: str, remedy: str) -> SchedulerError:
    return SchedulerError(f"rollout.scheduler={name} {what}; {remedy}")


def _said(thing: Any) -> str:
    text = " ".join(repr(thing).split())
    return text if len(text) <= SAID_MOST else f"{text[:SAID_MOST]}..."


def _is_list(thing: Any) -> bool:
    return isinstance(thing, Sequence) and not isinstance(thing, str | Mapping)
