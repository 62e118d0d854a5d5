"""Rounds: the agreed averaging of tensors between the peers of a run."""
