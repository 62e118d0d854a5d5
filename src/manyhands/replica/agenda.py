"""Agenda: what each round of a run is about: a batch to train on or, after an epoch, an evaluation.

An evaluation is a round like others, whose samples are those of another data set and from which
nothing is learnt: its samples are shared out, those of a peer that dies are redone, and its means
come with the record.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.data.calendar import Calendar


@dataclass(frozen=True, slots=True)
class Agenda:
    """Rounds with samples are counted through: `count`. Users know those that train: `round`."""

    calendar: Calendar
    most: int  # units of a turn
    num_evaluated: int = 0  # samples of an evaluation; 0: there is none
    most_evaluated: int = 1  # of a turn

    @property
    def rounds_per_epoch(self) -> int:
        """Its evaluation is one of them."""
        return self.calendar.rounds_per_epoch + bool(self.num_evaluated)

    def evaluates(self, count: int) -> bool:
        """Whether the round after so many is an evaluation."""
        return bool(self.num_evaluated) and (count + 1) % self.rounds_per_epoch == 0

    def round(self, count: int) -> int:
        """How many of so many train: the number of the next one that does."""
        return count - (count // self.rounds_per_epoch if self.num_evaluated else 0)

    def leg(self, count: int) -> int:
        """In which iteration of a loop the round after so many belongs: each epoch has two, one
        over what is trained on, one over what is evaluated.
        """
        return 2 * (count // self.rounds_per_epoch) + self.evaluates(count)

    def most_of(self, count: int) -> int:
        """Units of one of its turns at most."""
        return self.most_evaluated if self.evaluates(count) else self.most
