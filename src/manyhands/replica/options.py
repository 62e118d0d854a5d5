"""Options: what a user says of a run, and what a user is told of its rounds. Values only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from manyhands.collectives.ranges import Ranges
from manyhands.core.address import Address
from manyhands.core.errors import UsageError
from manyhands.core.peers import PeerId
from manyhands.core.settings import OUTAGE_S
from manyhands.replica.blame import POLICIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a run meets, and as whom this peer comes."""

    address: Address
    name: str | None = None
    min_peers: int = 1
    lease_s: float = 10.0
    outage_s: float = OUTAGE_S
    seed: int = 0

    def waiting(self, here: int) -> str:
        """For a peer that waits for others, while so many are there: what for, and what to do."""
        return (
            f"{here} of {self.min_peers} peers are in run {self.address.run}: it begins when all "
            "are. If one of them has ended before it came, start another; a smaller min_peers "
            "(manyhands run --min-peers) begins with fewer"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundClosed:
    """A round is done, and p.grad is its mean. For `Run.on_round`."""

    round: int
    samples: int
    weight: float
    """Of all its samples: their number, if `Run.weight` says nothing else."""
    shares: Mapping[PeerId, Ranges]
    """Who computed what of it: its units (samples, pairs, grains), counted from its first."""
    means: Mapping[str, float]
    """Those of `Run.mean` that came with it, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a model is trained; the same at every peer, but for `max_pass`."""

    grain_size: int | None = None
    """Samples of a unit that is never divided: what it gives depends on nobody's share."""
    epochs: int | None = None
    """Without it the run ends when its peers do."""
    max_pass: int | None = None
    """Samples that this peer can take at a time."""
    wire: str = "fp32"
    loss: str = "mean"
    """What the loss is over its batch: "mean" or "sum"."""
    shares: str = "speed"
    """By "speed", or "equal"."""
    bad_gradients: str = "skip"
    """What cannot be averaged: "skip" its samples, "drop" the peer if others can compute them, or
    "stop" the run."""
    resync_every: int = 256
    """Rounds after which peers of different arithmetic get equal parameters again."""
    checkpoints: str | os.PathLike[str] | None = None
    """A folder or any fsspec URL; the first of the roster saves there."""
    save_every: int | None = None
    """Rounds; without it, once an epoch."""
    save_all: bool = False
    """Whether a save that is due waits until the one before it is written; else it is left out, and
    a slow disk keeps nobody waiting."""
    keep: int = 3
    """So many checkpoints stay."""
    resume: bool | Literal["auto"] = False
    """Start from the newest checkpoint; a peer that has none waits for one that has, or with "auto"
    begins."""

    def __post_init__(self) -> None:
        for name in ("grain_size", "epochs", "max_pass", "resync_every", "save_every", "keep"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name}={value!r}", hint="a whole number of 1 or more, or None")
        for name, known in (
            ("loss", ("mean", "sum")),
            ("shares", ("speed", "equal")),
            ("bad_gradients", tuple(POLICIES)),
            ("resume", (True, False, "auto")),
        ):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name}={getattr(self, name)!r}", hint=f"one of {', '.join(map(str, known))}"
                )
        place = self.checkpoints
        is_place = isinstance(place, str | os.PathLike)  # pyright: ignore[reportUnnecessaryIsInstance]
        if place is not None and not (is_place and os.fspath(place)):
            raise UsageError(f"checkpoints={place!r}", hint="a folder or a URL, or None")
        if self.resume and place is None:
            raise UsageError(
                "nothing says where to resume from", hint="wrap(..., checkpoints=FOLDER_OR_URL)"
            )
