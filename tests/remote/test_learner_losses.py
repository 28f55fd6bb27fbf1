"""RemoteRoles round real processes without a model: what is repeated after a loss, and what ends the run."""

import os
import signal
from types import SimpleNamespace

import pytest

from rl_jax.exit_codes import exit_code
from rl_jax.learner.batch import empty_batch
from rl_jax.remote.group import Group
from rl_jax.remote.learner import LearnerLost, RemoteRoles
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import LocalStarter
from rl_jax.settings import ClusterSettings, LearnerSettings

pytestmark = pytest.mark.slow(seconds=10)

SETTINGS = ClusterSettings(heartbeat_s=0.2, lease_s=2.0, restarts=1)
LEARNER = LearnerSettings(row_tokens=8)
BATCH = empty_batch(LEARNER, ())


@pytest.fixture
def made(tmp_path):
    """made(**job) -> (roles, group, events); what the processes are told of the job decides how they end."""
    groups = []

    def make(**job):
        spec = Spec(name="learner.0", program="tests.remote.learner_double")
        group, events = Group([spec], SETTINGS, LocalStarter(SETTINGS, tmp_path)), []
        groups.append(group)
        note = lambda kind, **fields: events.append((kind, fields))
        policy = SimpleNamespace(rows=SimpleNamespace())
        return (
            RemoteRoles(group, policy, lambda step: {"from": step, **job}, {}, note),
            group,
            events,
        )

    yield make
    for group in groups:
        group.end()


def kill(group):
    os.kill(group.pids[0], signal.SIGKILL)


@pytest.mark.parametrize("verb", ["open", "warm_step", "saved"])
def test_loss_before_the_first_save_ends_the_run(made, verb):
    roles, _, events = made(dies_in=verb)
    roles.begin()
    with pytest.raises(LearnerLost, match="are lost before their first save: learner.0") as caught:
        if verb.startswith("warm"):
            teacher = roles.teacher(LEARNER, None)
            teacher.step(BATCH)
            teacher.done()
        roles.open()
        roles.save(0, {})
        roles.saved(0, {}, 20.0)
    assert "killed by SIGKILL" in str(caught.value) and exit_code(caught.value) == 5
    assert not events


def test_updates_since_the_save_are_repeated_and_losses_are_counted_over_the_run(made):
    roles, group, events = made()
    roles.begin()
    roles.open()
    roles.step(BATCH)
    roles.save(1, {})
    roles.saved(1, {}, 20.0)
    for num in (1.0, 2.0):  # the double counts from its save on
        num_all = roles.step(BATCH)["num"].mean
        assert num_all == num + 1
    kill(group)
    assert roles.step(BATCH)["num"].mean == 3, "two repeated, and this one"
    ((kind, fields),) = events
    assert (kind, fields["base"], fields["updates"]) == ("learner_lost", 1, 2)
    kill(group)
    lost = r"were lost 2 times \(cluster.restarts=1\): learner.0"
    with pytest.raises(LearnerLost, match=lost) as caught:
        roles.step(BATCH)
    assert exit_code(caught.value) == 5 and group.lost is not None
