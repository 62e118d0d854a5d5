"""Checkpoints: the state of a run as files and as parts for peers that join."""
