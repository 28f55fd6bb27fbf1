"""One running episode: an environment and a policy that answer each other until one of the two is done.

Owns: the order of an episode's calls, its budgets and its typed end. An Episode's sole writer is the task that runs it.
Invariants: nothing here blocks the event loop, and every await ends by the episode's deadline; what ended an episode is
one of env done (OK), a cut (TRUNCATED, with its cause), a Failure (FAILED) or a cancellation; the sampler's session is
released and the environment is handed back on every path; tokens only grow and are never rendered again, but where the
next turn begins a new context: a new sample of the same trajectory, which is trained apart from what was seen before.
That is under rollout.history=template, where the chat template shows another history than was seen (one without the
thoughts of earlier turns, say), with the tokens of what is kept of each turn; and where the environment says so
(StepResult.new_context: an agent that rewrote its history), with its messages and none of the tokens sampled before.
All contexts together fit one row of the learner.
Life of an episode:
1. The environment is opened and reset; the first context is rendered.
2. A turn is asked for with the whole context; where there is a barrier, when the other episodes are that far, too. A
   retryable TurnError is retried once. A turn that comes back aborted is resumed: what it sampled stays, and counts
   against the turn's budget.
3. The sampled text and its tool calls go to the environment; its answer is rendered onto the context. Back to 2. A
   call that cannot be read or made never reaches the environment: the policy is told why by a message of the tool, and
   the turn counts, with a reward of 0.
Budgets belong to the trajectory, not to a request: max_new_tokens a turn, `context` tokens in all, max_turns turns.
Cuts: a turn cut at max_new_tokens is closed by the renderer and the episode goes on (the Turn's finish counts it); if
it was the last turn, the trajectory is TRUNCATED by "length" even where the environment then said done. A full context
ends the episode after the environment saw the last turn ("context"); max_turns without done is "turn_limit".
Must not: score, retry an episode, or know of groups.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rl_jax.clock import now_s
from rl_jax.ledger import EpisodeRef
from rl_jax.rollout.assembly import ClosedEpisode, assemble, check_turn, merge_turns
from rl_jax.rollout.turn_barrier import TurnBarrier
from rl_jax.rollout.worker import EnvError, EnvHandle
from rl_jax.settings import RolloutSettings
from rl_jax.tokens import Renderer
from rl_jax.types import (
    Action,
    EpisodeView,
    Failure,
    FinishReason,
    Message,
    Outcome,
    Sampler,
    StepResult,
    Task,
    Turn,
    TurnError,
    TurnRequest,
)

__all__ = ["Episode", "EpisodeRules", "EpisodeTools", "assemble", "run_episode", "sample_seed"]

MAX_RESUMES = 64  # of one turn; a server that aborts without end must not spin the loop
DEADLINE_SLACK_S = (
    1.0  # the sampler answers within deadline_s; this much later it is taken for dead
)


@dataclass(frozen=True)
class EpisodeRules:
    """Budgets, sampling and deadlines of an episode."""

    context: int  # tokens of the whole trajectory
    max_new_tokens: int  # per turn
    max_turns: int  # 0 = the task's own limit
    temperature: float
    top_p: float
    top_k: int
    turn_deadline_s: float
    episode_timeout_s: float
    rewrites: bool = False  # rollout.history=template
    row_tokens: int = 0  # of all contexts of an episode together; 0 = one context

    @classmethod
    def of(
        cls, settings: RolloutSettings, context: int, turn_deadline_s: float, row_tokens: int = 0
    ) -> "EpisodeRules":
        """row_tokens: what the learner can train of one episode."""
        return cls(
            rewrites=settings.history == "template",
            row_tokens=row_tokens,
            context=context,
            max_new_tokens=settings.max_new_tokens,
            max_turns=settings.max_turns,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            turn_deadline_s=turn_deadline_s,
            episode_timeout_s=settings.episode_timeout_s,
        )


@dataclass(frozen=True)
class EpisodeTools:
    """What an episode calls."""

    sampler: Sampler
    open_env: Callable[[Task, str, int], Awaitable[EnvHandle]]  # (task, uid, seed)
    close_env: Callable[[EnvHandle], Any]  # returns at once: an episode does not wait for it
    renderer: Renderer
    count: Callable[[str], None]  # adds 1 to a counter of this name
    vocab_size: int = 0  # ids that a server may sample; 0 = the tokenizer's
    turn_phase: str = (
        "sampling turn"  # what a turn's maker does, for the lines that say what was awaited
    )
    # after a turn that the environment has answered; it must not wait
    turn_ended: Callable[["Episode"], None] = lambda episode: None


class EpisodeFailed(Exception):
    """A typed end of an episode; never leaves run_episode."""

    def __init__(self, failure: Failure):
        super().__init__(failure.detail)
        self.failure = failure


class Episode:
    """The live state of one attempt; `close` turns it into a record."""

    def __init__(
        self,
        ref: EpisodeRef,
        task: Task,
        run_seed: int,
        rules: EpisodeRules,
        place: str = "",
        barrier: TurnBarrier | None = None,
    ):
        """barrier: what it waits at before each turn, under its session; whoever gave it has joined it."""
        self.barrier = barrier
        self.ref, self.task, self.run_seed, self.rules = ref, task, run_seed, rules
        self.place = place  # where it holds a slot, for its requests
        self.turns: list[Turn] = []
        self.num_tokens = 0  # sampled so far
        self.steps: list[StepResult] = []
        self.texts: list[str] = []  # what the policy said, one a turn
        self.messages: list[Message] = list(task.messages)
        self.conversation: list[Message] = list(task.messages)  # the policy's messages among them
        self.new_samples: list[
            int
        ] = []  # turns whose context is not an extension of the last one's
        self.state_keys: list[str] = []
        self.roles: list[str] = []
        self.first_tokens = np.zeros(0, np.int32)
        self.start_version: int | None = None  # None before its environment is open
        self.oldest_version: int | None = (
            None  # a lower bound; None before the first turn is asked for
        )
        self.outcome: Outcome | None = None  # None while it runs
        self.truncated_by: str | None = None
        self.failure: Failure | None = None
        self.issued_s = now_s()
        self.phase, self.since_s = "queued", self.issued_s
        self._deadline_s = 0.0  # monotonic; set when it begins
        self._context = np.empty(256, np.int32)
        self._size = 0
        self._closed = 0  # tokens of the contexts before this one
        self._begun = (
            0,
            0,
        )  # messages of the conversation, and turns, before the environment's last new context

    @property
    def session(self) -> str:
        return f"{self.ref.uid}#{self.ref.attempt}"

    @property
    def where(self) -> str:
        """Names the attempt and its task, for people."""
        task = self.task
        return f"{self.session} (tag {task.tag}, task {task.id} of {task.env})"

    @property
    def max_turns(self) -> int:
        return self.rules.max_turns or self.task.max_turns

    @property
    def room(self) -> int:
        """Tokens the context can still take."""
        whole = max(self.rules.row_tokens, self.rules.context)
        return min(self.rules.context, whole - self._closed) - self._size

    def begin(self) -> None:
        """The episode timeout counts from now on."""
        self._deadline_s = now_s() + self.rules.episode_timeout_s

    def enter(self, phase: str) -> None:
        """Note what is waited for from now on (for the status line)."""
        self.phase, self.since_s = phase, now_s()

    def left(self, kept: int) -> int:
        """Tokens that a turn may still sample after `kept`."""
        left = self.rules.max_new_tokens - kept
        is_one = not (self.rules.rewrites or self._closed)  # a server knows one context
        return left if is_one else min(left, self.room)

    def extend(self, tokens: np.ndarray) -> None:
        """Append to the context."""
        end = self._size + len(tokens)
        if end > len(self._context):
            grown = np.empty(max(end, 2 * len(self._context)), np.int32)
            grown[: self._size] = self._context[: self._size]
            self._context = grown
        self._context[self._size : end] = tokens
        self._size = end

    def hear(self, messages: Sequence[Message]) -> None:
        """Note what the environment said."""
        self.messages += messages
        self.conversation += messages

    def fork(self, messages: Sequence[Message]) -> None:
        """These, which were heard last, are a whole conversation."""
        self._begun = len(self.conversation) - len(messages), len(self.turns)
        self.begin_sample()

    def shown(self) -> tuple[list[Message], list[np.ndarray]]:
        """The conversation of the present context, and the sampled tokens of the policy's turns in it."""
        start, first = self._begun
        return self.conversation[start:], [turn.tokens for turn in self.turns[first:]]

    def begin_sample(self) -> None:
        """The next turn's context is another than what was seen; what was sampled so far is trained apart."""
        self.new_samples.append(len(self.turns))
        self._closed += self._size
        self._context, self._size = np.empty(256, np.int32), 0

    def context(self) -> np.ndarray:
        """i32[n], read-only; what is already in it never changes, so no copy is needed."""
        view = self._context[: self._size]
        view.setflags(write=False)
        return view

    def time_left_s(self) -> float:
        return self._deadline_s - now_s()

    def end(self, outcome: Outcome, cause: str | None = None) -> None:
        self.outcome, self.truncated_by = outcome, cause

    def fail(self, boundary: str, kind: str, charged_to: str, detail: str) -> None:
        self.outcome = Outcome.FAILED
        self.failure = Failure(boundary, kind, charged_to, f"{self.where}: {detail}")

    def close(self) -> ClosedEpisode:
        """Raises ValueError while the episode still runs."""
        if self.outcome is None:
            raise ValueError(f"{self.session} is still in phase {self.phase}")
        return ClosedEpisode(
            ref=self.ref,
            task_id=self.task.id,
            first_tokens=self.first_tokens,
            turns=tuple(self.turns),
            steps=tuple(self.steps),
            state_keys=tuple(self.state_keys),
            roles=tuple(self.roles),
            outcome=self.outcome,
            truncated_by=self.truncated_by,
            failure=self.failure,
            start_version=self.start_version or 0,
            new_samples=tuple(self.new_samples),
        )

    def view(self) -> EpisodeView:
        """What a scorer may see."""
        info: dict[str, float] = {}
        for step in self.steps:
            info.update(step.info)
        rewards = tuple(step.reward for step in self.steps)
        return EpisodeView(tuple(self.conversation), tuple(self.texts), info, rewards)


def sample_seed(run_seed: int, epoch: int, index: int, sample: int, turn: int) -> int:
    """u64 seed of one turn; never depends on run id, attempt, slot or server."""
    text = f"{run_seed}/{epoch}/{index}/{sample}/{turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def env_seed(run_seed: int, epoch: int, index: int) -> int:
    """u64, one for all members of a group: they play the same problem."""
    text = f"env/{run_seed}/{epoch}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


async def run_episode(
    episode: Episode, tools: EpisodeTools, on_running: Callable[[], None]
) -> None:
    """Play until the episode's outcome is set. on_running() is called once, after a successful reset.

    Raises: CancelledError when cancelled; the outcome is then CANCELLED. Every other end is a typed outcome.
    """
    ref, handle = episode.ref, None
    episode.begin()
    deadline = asyncio.timeout(episode.rules.episode_timeout_s)
    try:
        async with deadline:
            episode.enter("opening its environment")
            handle = await tools.open_env(
                episode.task, ref.uid, env_seed(episode.run_seed, ref.epoch, ref.index)
            )
            await _play(episode, handle, tools, on_running)
    except TimeoutError:
        if not deadline.expired():
            raise
        tools.sampler.abort(ref.uid, "episode_timeout")
        limit = f"episode_timeout_s={episode.rules.episode_timeout_s:g}"
        episode.fail("rollout", "episode_timeout", "infra", f"{limit} passed while {episode.phase}")
    except EnvError as error:
        episode.fail("env", error.kind, error.charged_to, f"while {episode.phase}: {error.detail}")
    except TurnError as error:
        episode.fail("serve", error.kind, "infra", f"turn {len(episode.turns)}: {error}")
    except EpisodeFailed as error:
        failure = error.failure
        episode.fail(failure.boundary, failure.kind, failure.charged_to, failure.detail)
    except asyncio.CancelledError:
        tools.sampler.abort(ref.uid, "cancelled")
        episode.end(Outcome.CANCELLED)
        raise
    finally:
        tools.sampler.release(episode.session)
        if handle is not None:
            tools.close_env(handle)


async def _play(
    episode: Episode, handle: EnvHandle, tools: EpisodeTools, on_running: Callable[[], None]
) -> None:
    """Turns and environment steps in alternation; sets the outcome."""
    episode.start_version = tools.sampler.version()
    episode.enter("resetting its environment")
    seen = await handle.reset()
    on_running()
    if seen.done:
        raise EpisodeFailed(
            Failure("env", "done_at_reset", "infra", "reset() says done: nothing can be sampled")
        )
    episode.hear(seen.messages)
    offered = episode.task.tools
    added = _render(episode, partial(tools.renderer.first, episode.messages, offered))
    episode.first_tokens = added
    if len(added) >= episode.rules.context:
        detail = f"the prompt has {len(added)} tokens, engine.context={episode.rules.context}"
        raise EpisodeFailed(
            Failure(
                "rollout", "prompt_over_context", "infra", f"{detail}; raise it or shorten the task"
            )
        )
    while True:
        episode.extend(added)
        episode.state_keys.append(seen.state_key or _state_key(seen.messages))
        episode.roles.append(seen.to_agent)
        if episode.barrier is not None:
            episode.enter("waiting for the others' turns")
            await episode.barrier.wait(episode.session)
        turn = await _turn(episode, tools, added)
        episode.turns.append(turn)
        episode.num_tokens += len(turn.tokens)
        tools.count(f"turns/{turn.finish.value}")
        episode.enter("stepping its environment")
        action = tools.renderer.parse(turn.tokens, offered)
        episode.texts.append(tools.renderer.text(turn.tokens))
        episode.conversation.append(Message("assistant", episode.texts[-1]))
        if action.parse_error is None:
            seen = await handle.step(action)
        else:
            tools.count("episodes/malformed_calls")
            seen = StepResult(
                (Message("tool", action.parse_error),), reward=0.0, to_agent=seen.to_agent
            )
        episode.steps.append(seen)
        episode.hear(seen.messages)
        tools.turn_ended(episode)
        if seen.done:
            cuts = {FinishReason.LENGTH: "length", FinishReason.CONTEXT: "context"}
            cut = cuts.get(turn.finish)
            return episode.end(Outcome.TRUNCATED if cut else Outcome.OK, cut)
        if turn.finish is FinishReason.CONTEXT:
            return episode.end(Outcome.TRUNCATED, "context")
        if len(episode.turns) >= episode.max_turns:
            return episode.end(Outcome.TRUNCATED, "turn_limit")
        added = _next_context(episode, tools, action, seen)
        if len(added) >= episode.room:
            return episode.end(Outcome.TRUNCATED, "context")


def _next_context(
    episode: Episode, tools: EpisodeTools, action: Action, seen: StepResult
) -> np.ndarray:
    """What is added before the next turn: a suffix, or the whole context of a new sample where history is rewritten."""
    renderer, last = tools.renderer, episode.turns[-1].tokens
    if seen.new_context:
        whole = _render(episode, partial(renderer.first, seen.messages, episode.task.tools))
        episode.fork(seen.messages)
        tools.count("episodes/forked_contexts")
        return whole
    closed = renderer.is_closed(last)
    render = partial(renderer.next, seen.messages, closed=closed, calls=action.tool_calls)
    added = _render(episode, render)
    if not episode.rules.rewrites:
        return added
    conversation, turns = episode.shown()
    before = np.concatenate([episode.context(), added])
    rewrite = partial(renderer.rewritten, conversation, turns, before, episode.task.tools)
    whole = _render(episode, rewrite)
    if whole is None:
        return added
    episode.begin_sample()
    tools.count("episodes/rewritten_history")
    return whole


async def _turn(episode: Episode, tools: EpisodeTools, added: np.ndarray) -> Turn:
    """One whole turn, through aborts and one retry; its tokens are on the context when it returns.

    Raises: TurnError, EpisodeFailed.
    """
    parts: list[Turn] = []
    budget = episode.rules.max_new_tokens
    kept, retried = 0, False
    vocab_size = tools.vocab_size or tools.renderer.tokenizer.vocab_size
    while True:
        request = _request(episode, tools, kept)
        try:
            part = await _generate(episode, tools, request)
        except TurnError as error:
            if not error.retryable or retried:
                raise
            retried = True
            tools.count("turns/retried")
            continue
        problem = check_turn(part, vocab_size, budget - kept)
        if problem:
            detail = f"turn {request.turn} from server {part.server!r} has {problem}"
            raise EpisodeFailed(Failure("rollout", "schema", "infra", detail))
        parts.append(part)
        episode.extend(part.tokens)
        kept += len(part.tokens)
        if part.finish is not FinishReason.ABORT:
            finish = part.finish
            if finish is FinishReason.LENGTH and episode.room <= 0:
                finish = FinishReason.CONTEXT  # a server that folds the context into the budget
            break
        tools.count("turns/abort")
        if kept >= budget or episode.room <= 0:
            finish = FinishReason.LENGTH if kept >= budget else FinishReason.CONTEXT
            break
        if len(parts) > MAX_RESUMES:
            detail = f"turn {request.turn} was aborted {len(parts)} times"
            raise EpisodeFailed(Failure("serve", "aborted", "infra", detail))
    return merge_turns(parts, added, finish)


async def _generate(episode: Episode, tools: EpisodeTools, request: TurnRequest) -> Turn:
    sampler = tools.sampler
    episode.enter(f"{tools.turn_phase} {request.turn}")
    if episode.oldest_version is None:
        episode.oldest_version = sampler.version()
    slack = asyncio.timeout(request.deadline_s + DEADLINE_SLACK_S)
    try:
        async with slack:
            turn = await sampler.generate(request)
    except TimeoutError:
        if not slack.expired():
            raise
        sampler.abort(episode.ref.uid, "turn_deadline")
        detail = f"no answer {DEADLINE_SLACK_S:g} s after deadline_s={request.deadline_s:.3g}"
        raise TurnError("deadline", "sampler", detail) from None
    if not episode.turns and not request.token_index and turn.spans:
        episode.oldest_version = turn.spans[0].version  # versions only grow
    return turn


def _request(episode: Episode, tools: EpisodeTools, kept: int) -> TurnRequest:
    ref, rules, turn = episode.ref, episode.rules, len(episode.turns)
    return TurnRequest(
        uid=ref.uid,
        attempt=ref.attempt,
        turn=turn,
        tokens=episode.context(),
        temperature=rules.temperature,
        top_p=rules.top_p,
        top_k=rules.top_k,
        max_new_tokens=episode.left(kept),
        stop_token_ids=tools.renderer.stop_token_ids,
        stop=(),
        seed=sample_seed(episode.run_seed, ref.epoch, ref.index, ref.sample, turn),
        tag=ref.tag,
        deadline_s=max(0.0, min(rules.turn_deadline_s, episode.time_left_s())),
        token_index=kept,
        place=episode.place,
    )


def _render(episode: Episode, render: Callable[[], Any]) -> Any:
    """A message that cannot be rendered is the environment's failure."""
    try:
        return render()
    except ValueError as error:
        raise EpisodeFailed(Failure("env", "bad_observation", "infra", str(error))) from error


def _state_key(messages: Sequence[Message]) -> str:
    """Of an environment that names no state: a digest of what it said."""
    digest = hashlib.blake2b(digest_size=8)
    for message in messages:
        digest.update(f"{message.role}\0{message.content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
