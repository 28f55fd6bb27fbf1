"""What a run does before JAX is imported: its directory is checked, JAX told what to be, the environments spawned.

Owns the order of these three, for launch and for a notebook. Must not: import jax, or write.
"""

from pathlib import Path

from rl_jax import backend, config, live_view, resume
from rl_jax.algorithms.options import is_known, learns_from_rows
from rl_jax.mesh import MeshPlan
from rl_jax.rollout.worker import EnvPool
from rl_jax.run_dir import check_usable
from rl_jax.settings import Settings
from rl_jax.validate_cluster import drives_from_cpu

ERRORS = (config.ConfigError, resume.RunDirError, backend.BackendError)


def check_directory(parsed: config.Parsed) -> None:
    """Whether the run can have its directory. Raises RunDirError, and ConfigError for a package that is not there."""
    settings, options = parsed.settings, parsed.options
    if is_known(settings.algorithm):  # else by job.py, once it is loaded
        if options.run_dir:
            resume.decide(Path(options.run_dir), settings, options.resume)
        if options.mode == "eval":
            resume.check_eval(options.run_dir, settings, options.resume)
    if options.run_dir or not options.dry_run:
        check_usable(options.run_dir, is_held=not options.dry_run)
    if settings.metrics.progress == "rich" and (why := live_view.missing()):
        raise config.ConfigError([why])


def set_backend(settings: Settings, dry_run: bool = False) -> None:
    """Tell JAX, before its import, which backend and how many simulated devices: in a dry run, and where the real ones
    are other processes', as many as the plan needs, whatever the machine has. Raises BackendError."""
    mesh = settings.mesh
    plan = MeshPlan.from_settings(mesh, settings.model)
    backend.avoid_broken_fusions()
    takes_devices = not drives_from_cpu(settings)
    if takes_devices:
        if mesh.platform == "cpu" or all(pool.hardware == "cpu" for pool in plan.pools):
            backend.simulate_cpu_devices(plan.num_devices)  # on an accelerator this changes nothing
        backend.use_platform(mesh.platform)
    if dry_run or not takes_devices:
        backend.only_simulate(plan.num_devices)
    backend.enable_compile_cache()


def spawn_pool(parsed: config.Parsed) -> EnvPool | None:
    """The environments' worker processes, whose imports run beside ours; None where the mode plays no episode."""
    if not config.plays_episodes(parsed):
        return None
    settings = parsed.settings
    scouts = 1 if settings.cluster.moves_workers and not _plays_rows(parsed) else None
    pool = EnvPool(settings.tasks.sources, settings.rollout, settings.rewards, scouts=scouts)
    pool.spawn()
    return pool


def _plays_rows(parsed: config.Parsed) -> bool:
    """Whether the environments' scripts are all that a run needs of them, and there are no servers."""
    settings = parsed.settings
    if parsed.options.mode != "train" or not is_known(settings.algorithm):
        return False
    return learns_from_rows(settings.algorithm, settings.data)
