"""Trainer: the ready-made loop over a run."""
