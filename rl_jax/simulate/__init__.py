"""The real schedulers, routers and servers on a virtual clock, round engines that cost what a model of hardware says.

What it is for: questions about who decides what, when (which pool gets a turn, which episode starts, which server
prefills), answered within seconds and the same each time. An answer is about the decisions under the assumed costs,
never about hardware.

What is real: everything above the engine. serve.Router, DecodeServer and PrefillServer with their paging, prefix trees,
chunks and blocks; rollout's Slots, dispatcher, scheduler policies, episodes. They are the same objects as in a run, not
copies: they read the time from rl_jax.clock, which is the running loop's, and wait by asyncio.
What is assumed: how long a chunk, a block and a hand-over take (costs.py), and how long prompts, answers and waits for
environments are (the workload of who uses this).

The parts, and the seams between them:
- clock.py: an event loop whose time jumps to the next timer. All of a simulation runs on it, in one thread.
- stepped_loop.py: serve.loop.Loop without a thread. A server's iteration runs in one go; what it spends moves its own
  time ahead, and its answers leave at that time. A DecodeServer(..., loop=SteppedLoop) is otherwise unchanged.
- costs.py: hardware classes, the shape of a model, and from both the seconds of a dispatch.
- cost_engine.py: a types.Engine that makes no KV and any tokens, and spends those seconds.
- servers.py: servers of a MeshPlan on the clock, by the hardware that their pools name, and the Router over them.
- workload.py and rollout.py: episodes of drawn lengths, and rollout's parts wired as rollout.Rollout wires them,
  without its thread.
A policy is compared with another by running the same seeded workload twice: clock.run(main()), where main() makes
Servers and a SimulatedRollout(policy=...), plays, and returns what it saw; affinity.py and latency.py do so.

What a simulation can't show: host work (it costs nothing here), threads that disturb each other, and a caller that
would block (only a commit is served for one, at once).
Must not: be imported by what it simulates; measure anything of this machine.
"""
