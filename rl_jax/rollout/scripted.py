"""Scripted episodes: environments played by their own scripts, as data for the warm start.

Owns: a types.Sampler whose turns are what the environment's script() says. Everything else is the path of sampled
episodes: the same episode loop, budgets, renderer and assembly, so the trajectories train exactly the tokens a policy
would have sampled in their place. Versions are 0 and log-probs 0: behaviour ratios of scripts mean nothing.
Must not: touch the ledger or the buffer; score with scorers (supervised steps read no reward).
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_jax.ledger import EpisodeRef
from rl_jax.rewards.check import failed, from_steps
from rl_jax.rollout.assembly import assemble
from rl_jax.rollout.blocking import within
from rl_jax.rollout.episode import Episode, EpisodeRules, EpisodeTools, run_episode
from rl_jax.tokens import encodable
from rl_jax.types import (
    FinishReason,
    Group,
    Task,
    Turn,
    TurnError,
    TurnRequest,
    VersionSpan,
)

SCRIPT_EPOCH = -2  # as evaluation's -1: no other episode has these seeds
MAX_ATTEMPTS = 3  # of one scripted episode, as an environment may fail
NUM_LIVE = 64  # episodes at once: enough to keep the workers busy


class ScriptError(RuntimeError):
    """A scripted episode could not be played."""


@dataclass(frozen=True)
class ScriptPlan:
    """How many episodes, of what quality, from what seed."""

    num: int
    skill: float  # share of episodes that play the solution, 0..1
    seed: int
    timeout_s: float = 600.0  # for all of them


class ScriptSampler:
    """Implements types.Sampler; a session's environment must be opened through `open_env`."""

    def __init__(self, pool: Any, renderer: Any, plan: ScriptPlan):
        self._pool, self._renderer, self._plan = pool, renderer, plan
        self._handles: dict[str, Any] = {}  # by uid

    async def open_env(self, task: Task, uid: str, seed: int) -> Any:
        handle = await self._pool.open(task, uid, seed)
        self._handles[uid] = handle
        return handle

    async def generate(self, request: TurnRequest) -> Turn:
        """Raises TurnError "script" if the text does not fit into the turn, or does not come back from its tokens."""
        said = await self._handles[request.uid].script(request.seed, self._plan.skill)
        tokens, text = self._renderer.said(said), encodable(said.content)
        decoded = self._renderer.text(tokens)
        if decoded != text and not (said.tool_calls and decoded.startswith(text)):
            raise TurnError(
                "script", "script", f"the script's {text[:80]!r} is {decoded[:80]!r} once tokenized"
            )
        if len(tokens) > request.max_new_tokens:
            raise TurnError(
                "script",
                "script",
                f"the script's turn has {len(tokens)} tokens with its end; raise"
                f" rollout.max_new_tokens={request.max_new_tokens}",
            )
        return Turn(
            prompt_tokens=request.tokens[:0],  # the episode fills in what it added
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            sampled_logprobs=None,
            spans=(VersionSpan(0, len(tokens), 0),),
            context_mixed=np.zeros(len(tokens), bool),
            finish=FinishReason.STOP,
            cached_prompt=0,
            server="script",
            pool="script",
            times_s={},
        )

    def abort(self, uid: str, reason: str) -> None:
        """A script's turn cannot be cut."""

    def release(self, session: str) -> None:
        self._handles.pop(session.rpartition("#")[0], None)

    def version(self) -> int:
        return 0

    def capacity(self) -> dict[str, int]:
        return {"": NUM_LIVE}

    def places(self, tag: str) -> tuple[str, ...]:
        return ("",)


async def scripted_trajectories(
    pool: Any, tasks: Sequence[Task], renderer: Any, rules: EpisodeRules, plan: ScriptPlan
) -> list[Group]:
    """scripted_episodes as groups of one trajectory each. Raises ScriptError too if plan.timeout_s is over."""
    late = ScriptError(f"{plan.num} scripted episodes were not played within {plan.timeout_s:g} s")
    episodes = scripted_episodes(pool, tasks, renderer, rules, plan)
    return [_group(episode) for episode in await within(plan.timeout_s, episodes, late)]


async def scripted_episodes(
    pool: Any, tasks: Sequence[Task], renderer: Any, rules: EpisodeRules, plan: ScriptPlan
) -> list[Episode]:
    """`plan.num` episodes that ended, tasks in turn, in the order of the tasks.

    Deterministic in plan.seed. Raises ScriptError if an episode fails MAX_ATTEMPTS times, or its script is too long.
    """
    if not tasks:
        raise ScriptError("no tasks to play scripts on")
    sampler = ScriptSampler(pool, renderer, plan)
    closing: set[asyncio.Task] = set()

    def close_env(handle: Any) -> None:
        closer = asyncio.create_task(handle.close())
        closing.add(closer)
        closer.add_done_callback(closing.discard)

    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        counts[name] += 1

    tools = EpisodeTools(
        sampler,
        sampler.open_env,
        close_env,
        renderer,
        count,
        turn_phase="asking the script for turn",
    )
    tags = {task.tag for task in tasks}
    gates = {t: asyncio.Semaphore(pool.limits.get(t, NUM_LIVE)) for t in tags}
    live = asyncio.Semaphore(NUM_LIVE)

    async def play(i: int) -> Episode:
        task = tasks[i % len(tasks)]
        async with gates[task.tag], live:
            detail = ""
            for attempt in range(MAX_ATTEMPTS):
                group = f"script/{task.tag}/{i}"
                ref = EpisodeRef(f"{group}/0", attempt, group, SCRIPT_EPOCH, i, 0, task.tag)
                episode = Episode(ref, task, plan.seed, rules)
                await run_episode(episode, tools, lambda: None)
                if episode.failure is None:
                    return episode
                detail = episode.failure.detail
                if episode.failure.boundary != "env":
                    break
        raise ScriptError(f"scripted episode: {detail}")

    players = [asyncio.create_task(play(i)) for i in range(plan.num)]
    try:
        return await asyncio.gather(*players)
    finally:
        for player in players:
            player.cancel()
        await asyncio.gather(*players, *closing, return_exceptions=True)


def _group(episode: Episode) -> Group:
    reward = from_steps([step.reward for step in episode.steps])
    if episode.task.reward != "env" or reward.status != "scored":
        reward = failed("error", "scripted episodes are not scored", "script")
    trajectory = assemble(episode.close(), reward)
    ref = episode.ref
    return Group(ref.group, episode.task.id, ref.tag, ref.epoch, ref.index, (trajectory,))
