"""Frames and tensors as bytes."""
