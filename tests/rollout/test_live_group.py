"""What a scheduler sees of a group: made anew when something changed, and only then; and how old it is."""

from dataclasses import replace

import pytest

from rl_jax.ledger import EpisodeRef
from rl_jax.rollout.episode import Episode, EpisodeRules
from rl_jax.rollout.live_group import LiveGroup, Member
from rl_jax.rollout.tasks import IssuedTask
from rl_jax.settings import RolloutSettings
from rl_jax.testing.trajectories import fake_trajectory
from tests.rollout.doubles import echo_tasks

RULES = EpisodeRules.of(RolloutSettings(), 256, 60.0)


def member(sample: int) -> Member:
    task = echo_tasks()[0]
    return Member(
        Episode(EpisodeRef(f"r/0/0/{sample}", 0, "r/0/0", 0, 0, sample, "echo"), task, 7, RULES), ""
    )


def live_group(age_of="oldest"):
    return LiveGroup("r/0/0", IssuedTask(echo_tasks()[0], 0, 0), 3, 1.0, "echo", age_of)


def test_view_follows_every_change_and_is_kept_between_them():
    group = live_group()
    seen = []

    def look(now: int = 0):
        view = group.view(now)
        assert group.view(now) is view  # nothing changed
        assert view not in seen  # something did
        seen.append(view)
        return view

    assert (look().started, look(now=1).oldest_version) == (0, 1)
    for sample in range(3):
        group.members[sample] = member(sample)
        assert look(now=1).started == sample + 1
    group.members[0].episode.oldest_version = 0
    assert look(now=1).oldest_version == 0
    group.members[1].episode.num_tokens = 5
    assert look(now=1).num_tokens == (0, 5, 0)
    del group.members[1]
    trajectory = fake_trajectory(0, 1)
    group.add(trajectory)
    view = look(now=1)
    assert (view.started, view.scored, view.num_tokens) == (3, 1, (trajectory.num_trained, 0, 0))
    del group.members[2]
    group.leaving.add(1)  # its attempt was cancelled and has not ended
    assert (look(now=1).started, group.missing()) == (3, [2])
    group.leaving.remove(1)
    assert (look(now=1).started, group.missing()) == (2, [2])
    group.given_up.add(2)
    last = look(now=1)
    assert last.want == 2
    group.remove(trajectory.sample)
    group.add(replace(trajectory, start_version=5))  # as many as before, and not the same
    assert group.view(1) is not last


@pytest.mark.parametrize("age_of", ["oldest", "start"])
def test_a_group_is_as_old_as_its_oldest_token_or_its_first_start(age_of):
    """A member that was not started does not age; one that waits for its first token does, counted from its start."""
    by_start, group = age_of == "start", live_group(age_of)
    assert group.view(3).oldest_version == 3
    group.members[0] = member(0)
    assert group.view(3).oldest_version == 3  # its environment opens
    group.members[0].episode.start_version = 1
    assert group.view(3).oldest_version == (1 if by_start else 3)
    group.members[0].episode.oldest_version = 2
    assert group.view(3).oldest_version == (1 if by_start else 2)
    del group.members[0]
    late = replace(fake_trajectory(0, 0, version=2), start_version=0)
    assert late.num_trained
    group.add(late)
    assert group.view(3).oldest_version == (0 if by_start else 2)
    group.members[1] = member(1)
    assert group.view(4).oldest_version == (0 if by_start else 2)


@pytest.mark.parametrize("age_of, stale", [("oldest", [1, 2]), ("start", [0, 1, 2])])
def test_stale_members_are_told_by_their_own_age(age_of, stale):
    group = live_group(age_of)
    group.add(replace(fake_trajectory(0, 0, version=3), start_version=1))
    group.add(replace(fake_trajectory(0, 1, version=1), start_version=1))
    group.members[2] = member(2)
    group.members[2].episode.oldest_version = group.members[2].episode.start_version = 1
    assert group.stale(2, max_staleness=1) == []
    assert group.stale(3, max_staleness=1) == stale
    assert group.remove(1).sample == 1 and group.missing() == [1]
