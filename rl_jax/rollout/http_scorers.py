"""HttpScorers: scorers that a reward service runs (reward_app.py), as rollout sees them.

Owns: the HTTP calls of one run to its service, and what an answer of it means.
Invariants: an answer is a Reward as rewards/check.py says, or a status; what could not be asked is "error" or
"timeout", what was answered and is no reward is "schema", and none of them is a zero. A service that dies in a call is
asked again (rewards.retries, within rewards.total_timeout_s); a scorer that dies in one is the service's to replace.
Life: as ScorerPool: spawn() nothing; await check() that it answers and has the scorers; start(); score(); close().
Must not: import a scorer, or block the loop.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_jax.asgi import read_token
from rl_jax.rewards.check import failed, reward_of
from rl_jax.rewards.http_client import Deadlines, HttpClient, HttpError, RetryBudget
from rl_jax.rollout import wire
from rl_jax.rollout.scorer_pool import Answer
from rl_jax.settings import RewardSettings
from rl_jax.types import EpisodeView, Task
from rl_jax.waits import Wait

REMEDY = (
    "start it (python -m rl_jax.tools.reward_server), set rewards.url to where it is, or leave rewards.url empty to"
    " score in processes of this host"
)
STATUS = {
    "connect": "error",
    "lost": "error",
    "status": "error",
    "timeout": "timeout",
    "protocol": "schema",
}
CHECK_S = 3.0  # for the service to say which scorers it has


class ServiceError(Exception):
    """The service cannot be used, in one line."""


class HttpScorers:
    """Scorers of scorer_pool. All calls on one loop at a time."""

    failed: str | None = None

    def __init__(
        self,
        names: Iterable[str],
        settings: RewardSettings,
        *,
        counts: Counter[str] | None = None,
        of_turns: Iterable[str] = (),
    ):
        """of_turns: names of those that must score turns.

        counts: reward_requests, reward_retries, and reward_TIMEOUT, _error, _schema of what was not scored."""
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.log_dir: Path | None = None
        self._names, self._of_turns, self._settings = sorted(names), sorted(of_turns), settings
        self._client: HttpClient | None = None
        self._since_s: dict[int, tuple[str, float]] = {}  # calls under way

    def spawn(self) -> None:
        """Nothing of it runs here."""

    async def check(self) -> None:
        """Ask for its scorers. Raises: ServiceError, within seconds, that names what is wrong and what to do."""
        settings = self._settings
        if not self._names:
            return
        client = self._new_client(Deadlines(settings.connect_timeout_s, CHECK_S, CHECK_S), 1)
        try:
            said = await client.call("GET", "/v1/scorers")
        except HttpError as error:
            raise ServiceError(f"rewards.url={error.detail}; {REMEDY}") from None
        finally:
            await client.close()
        has = said.get("scorers") if isinstance(said, dict) else None
        if not isinstance(has, list) or not all(isinstance(name, str) for name in has):
            raise ServiceError(f"rewards.url={settings.url}: it is no reward service; {REMEDY}")
        if missing := [name for name in self._names if name not in has]:
            raise ServiceError(
                f"rewards.url={settings.url} has no scorer {', '.join(missing)}; it has {', '.join(sorted(has))[:500]};"
                " start it with --reward=package.module:attribute for each that is not of REWARDS"
            )
        scores_turns = said.get("of_turns")
        scores_turns = scores_turns if isinstance(scores_turns, list) else []
        if missing := [name for name in self._of_turns if name not in scores_turns]:
            raise ServiceError(
                f"rewards.url={settings.url}: {', '.join(missing)} there has no score_turn(), which turn_reward needs;"
                " name another turn_reward, or start the service again with a scorer that has it"
            )

    async def start(self) -> None:
        s = self._settings
        read_s = s.timeout_s + s.read_timeout_s
        self._client = self._new_client(
            Deadlines(s.connect_timeout_s, read_s, s.total_timeout_s), s.retries
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def waits(self) -> list[Wait]:
        """The call that has waited longest. Any thread."""
        calls = list(self._since_s.values())
        if not calls:
            return []
        what, since_s = min(calls, key=lambda call: call[1])
        limit = f"rewards.total_timeout_s={self._settings.total_timeout_s:g}"
        return [Wait(f"{what} at {self._settings.url}, one of {len(calls)}", since_s, limit)]

    async def score(
        self,
        name: str,
        task: Task,
        view: EpisodeView,
        *,
        turn: int | None = None,
        limit_s: float | None = None,
    ) -> Answer:
        """As Scorers."""
        assert self._client is not None, "start() comes first"
        s, client = self._settings, self._client
        limit_s = s.timeout_s if limit_s is None else limit_s
        payload: dict[str, Any] = {
            "name": name,
            "task": wire.task_to_wire(task),
            "view": wire.view_to_wire(view),
            "limit_s": limit_s,
            "wait_s": s.read_timeout_s / 2,  # else a 429 comes before the try is given up
        }
        if turn is not None:
            payload["turn"] = turn
        self.counts["reward_requests"] += 1
        number = self.counts["reward_requests"]
        self._since_s[number] = (f"score of {task.id}", asyncio.get_running_loop().time())
        try:
            said = await client.call(
                "POST", "/v1/score", payload, read_s=limit_s + s.read_timeout_s
            )
            answer = _answer(said, name)
        except HttpError as error:
            answer = Answer(failed(STATUS[error.kind], error.detail, name), 0.0)
        finally:
            del self._since_s[number]
            self.counts["reward_retries"] = client.num_retries
        if answer.reward.status != "scored":
            self.counts[f"reward_{answer.reward.status}"] += 1
        return answer

    def _new_client(self, deadlines: Deadlines, retries: int) -> HttpClient:
        """Raises: ServiceError for a URL or a token that is none."""
        s = self._settings
        try:
            token = read_token(s.token_file, "rewards.token_file")
        except ValueError as error:
            raise ServiceError(str(error)) from None
        try:
            return HttpClient(
                s.url,
                token=token,
                deadlines=deadlines,
                retries=retries,
                budget=RetryBudget(s.retry_budget),
                connections=s.connections,
            )
        except ValueError as error:
            raise ServiceError(f"rewards.url: {error}") from None


def _answer(said: Any, name: str) -> Answer:
    seconds = said.get("seconds", 0.0) if isinstance(said, dict) else 0.0
    is_time = isinstance(seconds, int | float) and 0.0 <= seconds < float("inf")
    return Answer(reward_of(said, name), float(seconds) if is_time else 0.0)
