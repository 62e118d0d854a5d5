"""Data: which samples come when, and how they are read."""
