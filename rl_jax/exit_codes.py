"""Which exit code an error of a job means: one table, in the order in which it is searched.

An error that is not in it is a bug of ours, and keeps its trace.
Must not: print, or know where an error came from.
"""

from rl_jax.algorithms.algorithm import RewardPartError
from rl_jax.algorithms.contract import AlgorithmRaised, ContractError
from rl_jax.backend import BackendError
from rl_jax.checkpoint import CheckpointError
from rl_jax.cluster import ServersNotReady
from rl_jax.config import ConfigError
from rl_jax.data.rows import DataError
from rl_jax.driver import SyncFailed
from rl_jax.guards import GuardTripped
from rl_jax.learner.batch import BatchError
from rl_jax.learner.trained import NonFiniteError
from rl_jax.ledger import LedgerError
from rl_jax.models.hf_files import WeightsError
from rl_jax.remote.learner import LearnerLost
from rl_jax.resume import RunDirError
from rl_jax.rollout.buffer import TakeTimeout
from rl_jax.rollout.evaluation import EvaluationFailed, EvaluationUnplayable
from rl_jax.rollout.player import EnvBudgetExhausted, FleetExhausted
from rl_jax.rollout.rollout import RolloutStopped
from rl_jax.rollout.scheduler.demands import SchedulerError
from rl_jax.rollout.scripted import ScriptError
from rl_jax.rollout.selection import SelectionExhausted
from rl_jax.rollout.tasks import TaskError
from rl_jax.rollout.traces import TraceError
from rl_jax.rollout.worker import EnvError
from rl_jax.serve.router import TemplateMismatch
from rl_jax.signals import Preempted
from rl_jax.weights.plan import SyncPlanError

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (ConfigError, 2),
    (BackendError, 2),
    (RunDirError, 2),
    (SyncPlanError, 2),
    (ContractError, 2),
    (AlgorithmRaised, 2),
    (SchedulerError, 2),
    (CheckpointError, 3),
    (TaskError, 3),
    (TraceError, 3),
    (BatchError, 3),
    (DataError, 3),
    (WeightsError, 3),
    (FileNotFoundError, 3),
    (EnvError, 4),
    (RewardPartError, 4),
    (EnvBudgetExhausted, 4),
    (ScriptError, 4),
    (SyncFailed, 5),
    (ServersNotReady, 5),
    (LearnerLost, 5),
    (TemplateMismatch, 5),
    (FleetExhausted, 5),
    (TakeTimeout, 5),
    (RolloutStopped, 5),
    (EvaluationUnplayable, 4),
    (EvaluationFailed, 5),
    (NonFiniteError, 6),
    (SelectionExhausted, 6),
    (GuardTripped, 6),
    (LedgerError, 7),
    (OSError, 7),
    (Preempted, 75),
)


def exit_code(error: BaseException) -> int | None:
    """Of an error that a user can act on; None for one that is ours."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), None)
