"""Supervised steps on scripted episodes before RL: a policy that plays badly but in the right form.

Life: 1 the environments' own scripts play episodes (a share `skill` of them solves the task, the rest acts at random),
assembled through the same path as sampled ones. 2 Batches of them go through a Learner whose algorithm is "sft".
3 The weights that come out are version 0 of the RL run; the RL optimizer starts fresh.
Must not: feed the ledger, the buffer or a curriculum: scripted episodes are data, not samples of the policy.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from rl_jax.learner.batch import pack, with_advantages
from rl_jax.metrics import Metric
from rl_jax.rollout.scripted import ScriptError
from rl_jax.settings import AlgorithmSettings, WarmStartSettings
from rl_jax.types import Group


def warm_start(
    learner,
    groups: Sequence[Group],
    settings: WarmStartSettings,
    seed: int,
    record: Callable[[int, Mapping[str, Metric]], None],
) -> float:
    """Run `settings.steps` supervised steps over shuffled passes of `groups` (one trajectory each); the last loss.

    Raises ScriptError if there are fewer scripted episodes than one batch holds.
    """
    size = settings.batch_episodes
    if len(groups) < size:
        raise ScriptError(
            f"warm_start.batch_episodes={size} but only {len(groups)} scripted episodes were made;"
            " lower it or raise tasks.sources[..].script_episodes"
        )
    sft = AlgorithmSettings(name="sft", aggregation="token-mean")
    order: list[Group] = []
    loss = float("nan")
    rng = random.Random(seed)
    for step in range(1, settings.steps + 1):
        if len(order) < size:  # the rest of a pass sits out: no episode is twice in a batch
            order = rng.sample(list(groups), len(groups))
        batch_groups, order = order[:size], order[size:]
        batch = pack(batch_groups, learner.settings, learner.rows.balance)
        batch, _ = with_advantages(batch, batch_groups, {}, learner.algorithm, None, sft)
        metrics = learner.step(batch, version=0)
        loss = metrics["policy/loss"].mean
        record(step, metrics)
    return loss
