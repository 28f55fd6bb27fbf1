"""Trajectories to gradients: batch.py, rows.py, step.py, trained.py, learner.py."""
