"""Dynamic sampling as the buffer does it: the algorithm's answer about one group, and the bound on sampling in vain.

A live run asks `Algorithm.select` about each group as it completes, so what it refuses takes no room and is replaced at
once. The bound counts, by tag, the groups that were refused since a batch was handed on; it is looked at only while a
batch is not full, so filtering beside a full buffer never ends a run. Rewards are counted before the answer too: what
is trained says little of how the policy does where only mixed groups are kept.
Must not: know algorithms, or write to the ledger (buffer.py does).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl_jax.algorithms.contract import ContractError, check_select
from rl_jax.metrics import Metric, pass_rates
from rl_jax.rollout.scheduler import REDUNDANT
from rl_jax.types import Group

Select = Callable[[Sequence[Group]], tuple[list[Group], list[tuple[str, str]]]]
FILTERED = "filtered"  # first word of the reason where `select` dropped a group or a member


class SelectionExhausted(RuntimeError):
    """The algorithm refused `limit` groups of a tag, and the step's batch is still not full."""


@dataclass
class Selection:
    """What the algorithm said of the groups completed since a batch was handed on; the buffer is its writer."""

    limit: int  # refused groups of a tag that end the run
    share: int  # groups of a tag in a batch
    kept: int = 0
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)  # (tag, reason) -> groups
    rewards: list[list[float | None]] = field(default_factory=list)  # of every member, by group

    def saw(self, group: Group) -> None:
        """Count a complete group, whatever becomes of it."""
        self.rewards.append([t.reward.value for t in group.trajectories])

    def drop(self, tag: str, reason: str) -> None:
        self.dropped[tag, reason] += 1

    def check(self, step: int, missing: Mapping[str, int]) -> None:
        """missing: groups by tag. Raises SelectionExhausted."""
        for tag, num in missing.items():
            of_tag = [(r, n) for (of, r), n in self.dropped.most_common() if of == tag]
            if (total := sum(n for _, n in of_tag)) >= self.limit:
                reasons = ", ".join(f"{reason.partition(': ')[2]} {n}" for reason, n in of_tag)
                raise SelectionExhausted(
                    f"step {step} still misses {num} of {self.share} groups of {tag}: {total} that completed since the"
                    f" batch before were not selected ({reasons}), which is"
                    f" rollout.max_filtered_batches={self.limit // self.share} batches; the task is solved or out of"
                    " reach for this policy: change its difficulty, loosen algorithm.filter, or raise the bound"
                )

    def metrics(self, batch_groups: int) -> dict[str, Metric]:
        asked = self.kept + sum(self.dropped.values())
        rewards = [value for values in self.rewards for value in values if value is not None]
        return {
            "filter/kept": Metric(self.kept, asked),
            "filter/batches": Metric(asked / batch_groups, 1),
            "reward/mean_all": Metric.of(rewards),
            "reward/success_all": Metric.of(value == 1.0 for value in rewards),
            **{f"reward/pass_at{k}_all": rate for k, rate in pass_rates(self.rewards).items()},
        }


def selected(group: Group, select: Select | None) -> tuple[Group | None, dict[str, str]]:
    """(the group as it may train or None, uid -> reason of what is dropped: the group itself, or members of it).

    Raises: ContractError if `select` did not keep or drop the group exactly once, or left tokens to a dropped member.
    """
    if select is None:
        return group, {}
    algorithm = getattr(select, "__self__", select)
    kept, dropped = check_select(algorithm, select([group]))
    reasons = {uid: f"{FILTERED}: {reason}" for uid, reason in dropped}
    chosen = kept[0] if kept else None
    names = [t.uid for t in group.trajectories]
    if (
        len(kept) + (group.uid in reasons) != 1
        or (chosen is not None and [t.uid for t in chosen.trajectories] != names)
        or not reasons.keys() <= set(names if chosen is not None else [group.uid])
    ):
        gave = (
            f"of group {group.uid} {len(kept)} kept and {', '.join(reasons) or 'nothing'} dropped"
        )
        want = "each group exactly once, kept with all its members or dropped"
        raise ContractError(algorithm, "select", gave, want)
    for member in chosen.trajectories if chosen is not None else ():
        if member.uid in reasons and member.loss_mask.any():
            gave = f"{member.uid} as dropped and left it tokens to train"
            raise ContractError(algorithm, "select", gave, "a dropped member an empty loss_mask")
    return chosen, reasons


def dropped_counts(drops: Mapping[str, int]) -> dict[str, float]:
    """Metrics of dropped episodes by reason; of those that were filtered also by the algorithm's own reason."""
    out = {f"episodes/dropped_{kind}": 0.0 for kind in ("stale", FILTERED, "short", REDUNDANT)}
    for reason, num in drops.items():
        kind, _, detail = reason.partition(": ")
        if (name := f"episodes/dropped_{kind}") in out:
            out[name] += num
        if kind == FILTERED:
            out[f"{name}.{detail}"] = num
    return out
