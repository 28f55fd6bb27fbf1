"""Trajectories to gradients: batch.py, microbatches.py, logprobs.py, mismatch.py, optimizer.py, step.py, learner.py."""
