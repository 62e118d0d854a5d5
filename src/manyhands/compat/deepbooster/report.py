"""Report: what `Trainer.start` returns, as values. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lost:
    """A trainer that is gone. Lines of an epoch that did not begin are untrained, too."""

    trainer: str
    chunk: str  # as the trainer named it, or its end; empty if it never took part
    untrained: int | None  # lines, counted once for each epoch they miss; None: nobody knows
    epoch: int  # in which it was lost, from 0
    line: int  # of this epoch, the first that was not trained, from 0

    def __str__(self) -> str:
        if self.untrained is None:
            return f"trainer {self.trainer} was gone before the first step; none of its lines count"
        return (
            f"trainer {self.trainer} is gone: {self.untrained} lines of {self.chunk} were not "
            f"trained, from line {self.line + 1} of epoch {self.epoch + 1} on"
        )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line whose gradient was refused by all, since it (or the mean with it) was not finite."""

    trainer: str
    chunk: str
    epoch: int
    line: int  # from 0, blank lines not counted

    def __str__(self) -> str:
        return (
            f"line {self.line + 1} of {self.chunk} (trainer {self.trainer}, epoch "
            f"{self.epoch + 1}) was left out: its gradient is not finite"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How a training went; the same at every trainer that ends it."""

    epochs: int
    steps: int  # of the optimizer
    lost: tuple[Lost, ...] = ()
    skipped: tuple[Skipped, ...] = ()
