"""Quarantine: what is done about samples that cannot be read, and how many of them are too many."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data.table import BadSample

log = logging.getLogger(__name__)

POLICIES = {
    "raise": "",
    "skip": "it is left out",
    "replace": "another one takes its place",
}
ATTEMPTS = 64  # replacements that are tried for one sample
_SHOWN = 5  # samples that an error lists


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What to do about a bad sample, and how many an epoch may have."""

    policy: str = "raise"
    max_bad: int = 100

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"bad={self.policy!r}", hint=f"one of {', '.join(POLICIES)}")
        if self.max_bad < 0:
            raise UsageError(f"max_bad={self.max_bad}", hint="0 or more")


class Other(NamedTuple):
    """A sample in place of another: its number among all, and where its random numbers begin."""

    place: int
    seed: int


def replacement(seed: int, attempt: int, size: int) -> Other:
    """What to read instead of a sample whose random numbers begin at `seed`: that says its epoch
    and position, and nothing else counts.
    """
    digest = hashlib.blake2b(
        f"{seed}:{attempt}".encode(), digest_size=16, person=b"manyhands-other"
    ).digest()
    place = int.from_bytes(digest[:8], "little") % size
    return Other(place, int.from_bytes(digest[8:], "little") >> 1)


class Bad(NamedTuple):
    """A sample that was to be at a position of an epoch, and cannot be read."""

    position: int
    error: BadSample


class TooManyBad(ManyhandsError):
    """More samples of one epoch cannot be read than the user takes. `bad` are the first of them."""

    def __init__(self, count: int, max_bad: int, epoch: int, bad: Sequence[BadSample]) -> None:
        shown = [error.message for error in bad[:_SHOWN]]
        if count > len(shown):
            shown.append(f"and {count - len(shown)} more")
        super().__init__(
            f"{count} samples of epoch {epoch} cannot be read, and max_bad={max_bad}: "
            + "; ".join(shown),
            hint="mend or remove these files, or give the Loader a larger max_bad",
        )
        self.bad = tuple(bad)


class Quarantine:
    """The bad samples that one loop has met. Used by its thread.

    What counts is a position of an epoch: the same however often it is read, and by whatever
    process. A file that comes at several of them (a Mixture may repeat it) counts at each.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._epoch = 0
        self._before = 0  # of this epoch, before this process knew of any
        self._met: dict[int, BadSample] = {}  # in this epoch, by position
        self._told: set[str] = set()
        self.bad: list[BadSample] = []
        """All that were met, each file or row once."""

    def count_in(self, epoch: int) -> int:
        """How many of an epoch were met, if it is the one under way."""
        return self._before + len(self._met) if epoch == self._epoch else 0

    def resume(self, epoch: int, count: int) -> None:
        """So many were met in this epoch, by a process before."""
        self._epoch, self._before = epoch, count
        self._met.clear()

    def meet(self, epoch: int, bad: Sequence[Bad]) -> None:
        """These were to be in a batch of that epoch, which counts. Raises TooManyBad, and then has
        not met them: the batch is not used.
        """
        if not bad:
            return
        if epoch != self._epoch:
            self.resume(epoch, 0)
        met = self._met | dict(bad)
        count = self._before + len(met)
        if count > self._rules.max_bad:
            raise TooManyBad(count, self._rules.max_bad, epoch, list(met.values()))
        self._met = met
        for _, error in bad:
            if error.where not in self._told:
                self._told.add(error.where)
                self.bad.append(error)
                log.warning("%s: %s", error.message, POLICIES[self._rules.policy])
