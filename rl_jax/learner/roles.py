"""The models of one run: the policy (or, alone, the reward model) that learns, and what its algorithm needs beside it.

Owns: which role computes which extra, and the order of a training step: critic, then policy. Roles that nothing needs
are not here: no weights, no program. The policy alone is an ordinary case.
Invariants: state, load and abstract_state hold all that training changes (policy and critic), under the policy's own
leaf names and `critic/...`; frozen policies are not in it: they come from a checkpoint that does not change.
Must not: choose where a role lies or what it starts from (build_roles.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from rl_jax.algorithms.options import IN_STEP
from rl_jax.learner.batch import Batch
from rl_jax.learner.critic import Critic
from rl_jax.learner.learner import Learner, batch_metrics
from rl_jax.learner.packing import Balance
from rl_jax.learner.reward_model import RewardModel
from rl_jax.learner.scorer import FrozenPolicy, Remembered
from rl_jax.learner.step import TrainState
from rl_jax.lowering import Program
from rl_jax.metrics import Metric
from rl_jax.models.model import Params
from rl_jax.timeline import OFF, Track


@dataclass
class Roles:
    policy: Learner | RewardModel
    critic: Critic | None = None
    head_start: int = 0  # steps of the critic before the policy's first update
    # "reference_logprobs" | "teacher_logprobs" | "reward_scores" -> who gives them
    frozen: dict[str, FrozenPolicy | Remembered] = field(default_factory=dict)

    track: Track = OFF

    wants_save: ClassVar[bool] = False  # beyond what the config says

    def trace(self, track: Track) -> None:
        """Have a timeline know what is computed."""
        self.track = self.policy.track = track
        if self.critic is not None:
            self.critic.track = track

    @property
    def params(self) -> Params:
        """The policy's master weights: what is published."""
        return self.policy.params

    @property
    def balance(self) -> Balance:
        """What pack evens the batch out over: the shards of the policy's mesh."""
        return self.policy.rows.balance

    @property
    def state(self) -> TrainState:
        """Valid until the next step."""
        if self.critic is None:
            return self.policy.state
        return replace(self.policy.state, critic=self.critic.state)

    def abstract_state(self, has_critic: bool = True) -> TrainState:
        """What a checkpoint restores into. has_critic: whether it was saved with one; one that starts anew is left."""
        state = self.policy.abstract_state()
        if self.critic is None or not has_critic:
            return state
        return replace(state, critic=self.critic.abstract_state())

    def load(self, state: TrainState) -> None:
        """Go on from a state of abstract_state's structure; its arrays are copied."""
        self.policy.load(replace(state, critic=None))
        if self.critic is not None and state.critic is not None:
            self.critic.load(state.critic)

    def lower(self, batch: Batch) -> Iterator[Program]:
        """The programs of all that learns, from shapes alone; of batches with the extras of this one."""
        if self.critic is not None:
            yield from self.critic.lower(batch)
        yield from self.policy.lower(batch)

    def score(self, batch: Batch, needs: Iterable[str]) -> dict[str, np.ndarray]:
        """The extras an algorithm needs, f32[B, T] each, 0 where not trained. Raises: ValueError for one nobody has."""
        wanted = set(needs) - IN_STEP
        if not wanted:
            return {}
        with self.track.span("score", needs=sorted(wanted)):
            return self._score(batch, wanted)

    def _score(self, batch: Batch, wanted: set[str]) -> dict[str, np.ndarray]:
        mine: dict[str, Any] = {name: role.score for name, role in self.frozen.items()}
        if self.critic is not None:
            mine["values"] = self.critic.score
        out = {name: score(batch) for name, score in mine.items() if name in wanted}
        return {**self.policy.score(batch, wanted - out.keys()), **out}

    def step(self, batch: Batch, version: int = 0) -> dict[str, Metric]:
        """One step of every role that learns; metrics of all. Raises: as Learner.step."""
        if self.critic is None:
            return self.policy.step(batch, version)
        waits = self.head_start and self.critic.num_batches < self.head_start
        metrics = self.critic.step(batch, version)
        if waits:
            self.policy.hold()
            return {**metrics, **batch_metrics(batch, version, self.policy.algorithm.samples)}
        return {**metrics, **self.policy.step(batch, version)}
