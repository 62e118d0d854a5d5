"""Leaving: an agent that is to go. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Leaving:
    """The agent is to go: why, and from when on it waits for nobody."""

    why: str
    patient: bool = True
    until_s: float | None = None
    number: int | None = None
    """Of the Status that has to arrive first; 0 once it has."""
    error: Exception | None = None
    """Raised in the end, where that is not as it should be."""
