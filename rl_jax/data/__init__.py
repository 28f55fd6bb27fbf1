"""Rows to learn from that no policy of ours sampled: JSON lines -> trajectories, in a checkpointable order.

A package of its own, beside rollout/: here nothing runs, waits or is scored, and a supervised run has no rollout. What
both share, the order of an epoch (order.py), is here because data is the lower of the two.
Life of a row: 1 rows.py finds the files and says what one line means. 2 examples.py renders it with the renderer that
rollout uses, so that a policy meets in RL the tokens it was taught, and marks what is trained. 3 corpus.py has read
every line once before the run directory is made: what is bad is refused by file and line, what is too long is counted,
what is held out is chosen; it keeps offsets, not text. 4 stream.py gives batches of groups, shuffled by the seed, from
a position that a checkpoint holds.
Must not: import jax, or know a loss.
"""
