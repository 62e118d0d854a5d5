"""Observe: what a run tells its user: loggers."""
