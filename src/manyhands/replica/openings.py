"""Openings: where in the history of a run it was started, or started again from a checkpoint.

The first peer of a run is alone in its first round, and others come in by the record of one. So a
run opens with two rounds without samples: the first confirms the state that the others have
brought, the second takes them in, once as many are there as the user wants. From then on rounds
have samples, and their number is what the user knows as the round.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

ROUNDS = 2  # of an opening


@dataclass(frozen=True, slots=True)
class Openings:
    """Numbers of the rounds that were first of an opening, in order. All peers have the same."""

    starts: tuple[int, ...] = ()

    def is_opening(self, applied: int) -> bool:
        """Whether that round has no samples."""
        return any(start <= applied < start + ROUNDS for start in self.starts)

    def is_gathering(self, applied: int) -> bool:
        """Whether it is the one that waits for others."""
        return applied - 1 in self.starts

    def count(self, applied: int) -> int:
        """Of so many rounds, those with samples; also the number of a round that has some."""
        return applied - sum(number < applied for number in _rounds(self.starts))

    @property
    def num_rounds(self) -> int:
        """That have no samples."""
        return len(_rounds(self.starts))

    def opened(self, applied: int) -> Openings:
        """With one more, before that round."""
        return Openings((*self.starts, applied))


@lru_cache(maxsize=16)
def _rounds(starts: tuple[int, ...]) -> frozenset[int]:
    """Two openings may overlap: of a run that ended while it opened, and was resumed."""
    return frozenset(start + number for start in starts for number in range(ROUNDS))


def opened_chain(chain: bytes, about: bytes) -> bytes:
    """The history is another one from here on: whoever has not opened it, or goes on with another
    description than `about` is a digest of, is not confirmed.
    """
    return hashlib.blake2b(b"opened" + chain + about, digest_size=32).digest()
