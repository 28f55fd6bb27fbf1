"""Episodes: tasks, scheduling, environments, rewards, groups, the sample buffer and evaluation.

Life of a trajectory, one file a station:
1. tasks.py yields a Task. 2. scheduler/ admits a group of episodes for it. 3. episode.py plays one: env_process.py and
worker.py keep the blocking environment in another process, types.Sampler (serving) makes the turns, tokens.py of the
parent package converts. 4. reward_service.py scores the closed episode. 5. rollout.py, which owns the asyncio thread
all this runs on, completes the group. 6. buffer.py holds it until the driver takes it, and drops it if it grew stale.
Beside it: evaluation.py plays pinned tasks, scripted.py plays scripts for the warm start, traces.py writes and reads
what was trained. Must not: import serving, the engine, the learner or jax.
"""
