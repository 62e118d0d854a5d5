"""Passing: which errors of dialling pass, so that whoever was in a run dials again."""

from __future__ import annotations

from typing import TypeGuard

from manyhands.core.errors import LinkBroken, LinkTimeout, ManyhandsError, Refused, WireError

# A hub that is being closed may be followed by another. The others are what a broker that is just
# starting, or has not yet noticed that our last connection is dead, may answer.
_CODES = frozenset({"closing", "missing", "locked", "vhost", "precondition"})


def passes(error: Exception) -> TypeGuard[ManyhandsError]:
    """Whether it may be another answer soon: for how long to try is the caller's to know."""
    if isinstance(error, Refused):
        return error.code in _CODES
    return isinstance(error, LinkBroken | LinkTimeout | WireError)
