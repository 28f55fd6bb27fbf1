"""One attempt at an episode, from its ISSUED record to a scored trajectory or a typed failure.

Owns: the ledger records of an attempt up to COMPLETED, TRUNCATED, ERRORED or CANCELLED; the counters of how episodes
end; and the row of infra failures that stops the run. Training and evaluation play through it alike.
The row: infra failures since the last good episode. One event may end many episodes (a worker dies, a server is
fenced), so of those issued before the row began only the first counts, and env_lost (the fault was another's) never.
Life of an attempt: 1 issue writes ISSUED. 2 play_turns runs it (RUNNING after reset) and hands the environment back.
3 score gives it its reward, assembles the trajectory and writes how it ended, with the trajectory's sha256. 4 What
happens to it then (TRAINED, DROPPED, EVALUATED) is the business of whoever issued it.
Must not: know groups, slots or the scheduler; run off the rollout's loop.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rl_jax.clock import now_s
from rl_jax.ledger import EpisodeFacts, EpisodeRef, Ledger
from rl_jax.rollout.assembly import ClosedEpisode, assemble
from rl_jax.rollout.episode import Episode, EpisodeRules, EpisodeTools, run_episode
from rl_jax.rollout.reward_service import RewardService, TurnScores
from rl_jax.rollout.scheduler import REDUNDANT
from rl_jax.rollout.traces import trajectory_sha256
from rl_jax.rollout.turn_barrier import TurnBarrier
from rl_jax.types import Failure, Outcome, Reward, Task, Trajectory

LOG = logging.getLogger(__name__)


class EnvBudgetExhausted(RuntimeError):
    """Too many infra failures in a row: nothing the policy does would be trained."""

    exit_code = 4


class FleetExhausted(RuntimeError):
    """As EnvBudgetExhausted, where serving failed."""

    exit_code = 5


@dataclass
class Player:
    """Loop-thread only. `fatal` is called at most once, with the error that ends the run."""

    tools: EpisodeTools
    rewards: RewardService
    ledger: Ledger
    run_seed: int
    max_failures: int  # infra failures in a row
    fatal: Callable[[BaseException], None]
    quarantine_dir: Path | None = None  # where trajectories with a malformed turn are kept
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self):
        self._in_a_row: Counter[str] = Counter()  # by reason
        self._row_began_s = 0.0  # monotonic, when its first failure was counted
        self._turns: dict[str, TurnScores] = {}  # by session, of those whose turns are scored

    def issue(
        self,
        ref: EpisodeRef,
        task: Task,
        rules: EpisodeRules,
        place: str,
        barrier: TurnBarrier | None = None,
    ) -> Episode:
        """Write ISSUED; the episode, which holds a slot in `place`, does not run yet. barrier: as Episode's."""
        start = EpisodeFacts(start_version=self.tools.sampler.version())
        self.ledger.write(ref, "ISSUED", facts=start)
        self.counts["episodes/issued"] += 1
        if ref.attempt:
            self.counts["episodes/retried"] += 1
        return Episode(ref, task, self.run_seed, rules, place, barrier)

    async def play_turns(self, episode: Episode) -> None:
        """Run it until its outcome is set; when this returns its environment and its slot are free."""
        tools = self.tools
        turns = self.rewards.turns_of(episode.task) if _is_trained(episode) else None
        if turns is not None:
            self._turns[episode.session] = turns
            tools = replace(tools, turn_ended=lambda episode: turns.ended(episode.view()))
        try:
            await run_episode(
                episode,
                tools,
                lambda: self.ledger.write(episode.ref, "RUNNING", facts=_facts(episode)),
            )
        except BaseException:
            self._forget_turns(episode)
            raise

    async def score(self, episode: Episode) -> Trajectory:
        """Score, assemble and write how the attempt ended. Its outcome is OK, TRUNCATED or FAILED."""
        closed, turns = episode.close(), self._turns.get(episode.session)
        reward = Reward(None, {}, (), "error", "")
        if closed.outcome is not Outcome.FAILED:
            episode.enter("being scored")
            reward, failure = await self.rewards.score(
                episode.task, episode.view(), turns, with_shaping=_is_trained(episode)
            )
            if failure is not None:
                failure = replace(failure, detail=f"{episode.where}: {failure.detail}")
                closed = replace(closed, outcome=Outcome.FAILED, failure=failure)
        self._forget_turns(episode)
        if episode.outcome is Outcome.CANCELLED:  # cancelled while it was scored
            raise asyncio.CancelledError
        trajectory = assemble(closed, reward, reward.turn_values if turns else None)
        if closed.failure is not None:
            self._write_failed(closed, closed.failure)
            self._count_in_a_row(closed.failure, episode.issued_s)
        else:
            self._write_closed(trajectory)
        episode.enter("done")
        return trajectory

    def cancel(self, episode: Episode, reason: str) -> None:
        """Write CANCELLED. The caller cancels the task that runs it."""
        episode.end(Outcome.CANCELLED)
        self._forget_turns(episode)
        self.ledger.write(episode.ref, "CANCELLED", reason=reason, facts=_facts(episode))
        self.counts["episodes/cancelled"] += 1
        if reason == REDUNDANT:
            self.counts["episodes/cancelled_redundant"] += 1

    def _forget_turns(self, episode: Episode) -> None:
        if (turns := self._turns.pop(episode.session, None)) is not None:
            turns.cancel()

    def _write_closed(self, trajectory: Trajectory) -> None:
        state = "COMPLETED" if trajectory.outcome is Outcome.OK else "TRUNCATED"
        facts = EpisodeFacts(
            trajectory.start_version,
            tuple(np.unique(trajectory.versions[trajectory.loss_mask]).tolist()),
            trajectory.num_trained,
            trajectory_sha256(trajectory),
        )
        self.ledger.write(_ref(trajectory), state, facts=facts)
        self.counts[f"episodes/{state.lower()}"] += 1
        if trajectory.truncated_by:
            self.counts[f"episodes/truncated.{trajectory.truncated_by}"] += 1
        self._in_a_row.clear()

    def _write_failed(self, closed: ClosedEpisode, failure: Failure) -> None:
        reason = failure_reason(failure)
        facts = EpisodeFacts(closed.start_version, _versions(closed.turns), closed.num_tokens)
        self.ledger.write(closed.ref, "ERRORED", reason=reason, facts=facts)
        self.counts["episodes/errored"] += 1
        self.counts[f"episodes/errored.{reason}"] += 1
        LOG.warning(
            "episode ERRORED (%s, charged to %s): %s",
            reason,
            failure.charged_to,
            failure.detail,
            extra={"kind": f"episode ERRORED ({_cause(failure)})"},  # see console.py
        )
        if failure.boundary == "rollout" and failure.kind == "schema":
            self._quarantine(closed, failure)

    def _count_in_a_row(self, last: Failure, issued_s: float) -> None:
        if last.kind == "env_budget":  # the pool itself gave up: no environment opens any more
            self.fatal(EnvBudgetExhausted(last.detail))
            return
        if last.charged_to != "infra" or last.kind == "env_lost":
            return
        if not self._in_a_row:
            self._row_began_s = now_s()
        elif issued_s < self._row_began_s:
            return
        self._in_a_row[failure_reason(last)] += 1
        num = self._in_a_row.total()
        if num < self.max_failures:
            return
        reasons = ", ".join(f"{n} {reason}" for reason, n in self._in_a_row.most_common())
        kind = FleetExhausted if last.boundary == "serve" else EnvBudgetExhausted
        self.fatal(
            kind(
                f"{num} episodes in a row failed through no fault of the policy ({reasons}), the limit is"
                f" rollout.max_env_failures={self.max_failures}; the last: {last.detail}"
            )
        )

    def _quarantine(self, closed: ClosedEpisode, failure: Failure) -> None:
        """Keep what a server sent, off the loop; nothing of it is trained."""
        if self.quarantine_dir is None:
            return
        record = {
            "uid": closed.ref.uid,
            "attempt": closed.ref.attempt,
            "detail": failure.detail,
            "turns": [turn.tokens.tolist() for turn in closed.turns],
        }
        name = f"{closed.ref.uid}#{closed.ref.attempt}".replace("/", "_")
        path = self.quarantine_dir / f"{name}.json"
        asyncio.get_running_loop().run_in_executor(None, _write_json, path, record)


def failure_reason(failure: Failure) -> str:
    """The ledger's reason: boundary_kind, without saying the boundary twice (env_timeout, reward_schema)."""
    if failure.kind.startswith(failure.boundary):
        return failure.kind
    return f"{failure.boundary}_{failure.kind}"


def _cause(failure: Failure) -> str:
    """One word for failures of one cause: of those that lived in a worker that ended, each has a reason of its own."""
    ended = failure.boundary == "env" and failure.kind in ("env_timeout", "env_died", "env_lost")
    return "its worker ended" if ended else failure_reason(failure)


def _is_trained(episode: Episode) -> bool:
    """Not of an evaluation, which reads values alone."""
    return episode.ref.epoch >= 0


def _facts(episode: Episode) -> EpisodeFacts:
    return EpisodeFacts(episode.start_version or 0, _versions(episode.turns), episode.num_tokens)


def _versions(turns) -> tuple[int, ...]:
    return tuple(sorted({span.version for turn in turns for span in turn.spans}))


def _ref(t: Trajectory) -> EpisodeRef:
    return EpisodeRef(t.uid, t.attempt, t.group, t.epoch, t.index, t.sample, t.tag)


def _write_json(path: Path, record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="ascii")
    temporary.replace(path)
