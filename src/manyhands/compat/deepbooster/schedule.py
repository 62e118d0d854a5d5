"""Schedule: which line comes next, who is gone, when it is over. Pure, and no torch.

Every trainer says the same few things of itself with each contribution; the lead of a round
gathers them into a note, which everybody gets with the result. The schedule is a function of these
notes alone, so all trainers are always at the same place:

    GATHER ─► INTRODUCE ─► EQUALIZE ─► TRAIN ─► DONE
    until all  who is       one gives   a line   all leave
    are here   here?        its weights a round
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import msgspec

from manyhands.collectives.messages import NOTES_BYTES, Part
from manyhands.compat.deepbooster.errors import TrainingBroken
from manyhands.compat.deepbooster.report import Lost, Report, Skipped

_Count = Annotated[int, msgspec.Meta(ge=0)]
_CHUNK_CHARS = 200


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a trainer says of itself with every contribution."""

    place: _Count  # of its name in the sorted `trainers_queues`
    lines: _Count  # of its chunk
    chunk: str  # its path, or the end of it
    settings: bytes  # digest of what must be the same at all trainers
    used: bytes = b""  # one bit a tensor, lowest first: its line gave it a gradient


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the lead makes of all contributions to a round."""

    gathered: bool  # nobody is on the way in any more
    standings: tuple[Standing, ...]  # of the round's members, without `used`
    counted: tuple[_Count, ...]  # the places of those whose values went into the round
    used: bytes  # by any of them


class Phase(enum.Enum):
    """What a round is about."""

    GATHER = "gather"
    INTRODUCE = "introduce"
    EQUALIZE = "equalize"
    TRAIN = "train"
    DONE = "done"


def shorten(chunk: str, num_trainers: int) -> str:
    """A path such that the paths of all trainers fit into one note; its end says most."""
    most = max(8, min(_CHUNK_CHARS, NOTES_BYTES // 2 // num_trainers))
    while len(chunk.encode(errors="replace")) > most:
        chunk = chunk[1:]
    return chunk


def write_standing(standing: Standing) -> bytes:
    """As it travels in a SelfReport."""
    return msgspec.msgpack.encode(standing)


def write_note(parts: Sequence[Part], *, gathered: bool, num_trainers: int) -> bytes:
    """The lead's note on a round, from all contributions to part 0."""
    standings: list[Standing] = []
    counted: list[int] = []
    used = 0
    for part in parts:
        try:
            standing = msgspec.msgpack.decode(
                part.report.scalars if part.report else b"", type=Standing
            )
        except msgspec.DecodeError:
            continue  # of another release: to the others, that trainer is gone
        if standing.place >= num_trainers:
            continue  # no trainer of this training: likewise
        standings.append(msgspec.structs.replace(standing, used=b""))
        if part.ranges:  # all of a round's samples stand for one line of each member
            counted.append(standing.place)
        used |= int.from_bytes(standing.used, "little")
    return msgspec.msgpack.encode(Note(gathered, tuple(standings), tuple(counted), pack(used)))


def read_note(data: bytes, num_trainers: int) -> Note:
    """Raises TrainingBroken for what is none."""
    try:
        note = msgspec.msgpack.decode(data, type=Note)
        highest = max((*(one.place for one in note.standings), *note.counted), default=0)
        if highest >= num_trainers:
            raise ValueError(f"trainer {highest} of {num_trainers}, from 0")
        return note
    except (msgspec.DecodeError, ValueError) as error:
        raise TrainingBroken(
            f"another trainer sent what is no note about a training: {error}",
            hint="do all of them have the same release of manyhands?",
        ) from None


def pack(bits: int) -> bytes:
    """Bits as bytes, lowest first."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


class Schedule:
    """Where the training is; `advance` takes it one committed round further."""

    def __init__(self, names: Sequence[str], n_epoch: int, num_states: int = 1) -> None:
        """`names`: the sorted `trainers_queues`. `num_states`: rounds of EQUALIZE."""
        self._names, self._n_epoch, self._num_states = names, n_epoch, num_states
        self.phase = Phase.GATHER
        self.present: dict[int, Standing] = {}
        self.equalized = 0  # states that all have from the source
        self.epoch = self.step = 0  # the step of the epoch is the line that each trainer does
        self.fault: TrainingBroken | None = None  # why they cannot train; then they are DONE, too
        self._steps = 0
        self._lost: list[Lost] = []
        self._skipped: list[Skipped] = []

    @property
    def source(self) -> int:
        """Whose weights, and momentum, all of them start from: the first one by name."""
        return min(self.present)

    @property
    def report(self) -> Report:
        """How it went so far."""
        return Report(
            epochs=self.epoch,
            steps=self._steps,
            lost=tuple(self._lost),
            skipped=tuple(self._skipped),
        )

    def advance(self, note: Note, weight: float) -> list[Lost | Skipped]:
        """A round is committed; what is to be reported of it."""
        news: list[Lost | Skipped] = []
        match self.phase:
            case Phase.GATHER:
                if note.gathered:
                    self.phase = Phase.INTRODUCE
            case Phase.INTRODUCE:
                self.present = {one.place: one for one in note.standings}
                absent = [n for p, n in enumerate(self._names) if p not in self.present]
                news += [Lost(name, "", None, 0, 0) for name in absent]
                self.fault = self._compare_settings()
                self.phase = Phase.EQUALIZE if self.fault is None else Phase.DONE
            case Phase.EQUALIZE:
                source = self.source
                news += self._find_lost(note)
                # Else the one who should have given its weights is gone: all from another one.
                same = weight > 0 and self.source == source
                self.equalized = self.equalized + 1 if same else 0
                if self.equalized == self._num_states:
                    self.phase = Phase.TRAIN
                    self._turn_epoch()
            case Phase.TRAIN:
                news += self._find_lost(note)
                news += self._find_skipped(note)
                self._steps += weight > 0
                self.step += 1
                self._turn_epoch()
            case Phase.DONE:
                pass
        self._lost += [one for one in news if isinstance(one, Lost)]
        self._skipped += [one for one in news if isinstance(one, Skipped)]
        return news

    def untrained(self, lines: int) -> int:
        """How many lines of such a chunk are still to come, in this epoch and the later ones."""
        return max(0, lines - self.step) + lines * (self._n_epoch - self.epoch - 1)

    def _turn_epoch(self) -> None:
        longest = max(one.lines for one in self.present.values())
        if longest == 0:
            self.phase = Phase.DONE
        elif self.step >= longest:
            self.epoch, self.step = self.epoch + 1, 0
            if self.epoch >= self._n_epoch:
                self.phase = Phase.DONE

    def _find_lost(self, note: Note) -> list[Lost]:
        here = {one.place for one in note.standings}
        gone = {place: one for place, one in self.present.items() if place not in here}
        for place in gone:
            del self.present[place]
        return [
            Lost(
                self._names[place],
                one.chunk,
                self.untrained(one.lines),
                self.epoch,
                self.step,
            )
            for place, one in gone.items()
        ]

    def _find_skipped(self, note: Note) -> list[Skipped]:
        return [
            Skipped(self._names[place], one.chunk, self.epoch, self.step)
            for place, one in self.present.items()
            if self.step < one.lines and place not in note.counted
        ]

    def _compare_settings(self) -> TrainingBroken | None:
        """All of them find the same, and leave together: none may be taken for one that died."""
        first = self.present[self.source].settings
        odd = [self._names[p] for p, one in self.present.items() if one.settings != first]
        if not odd:
            return None
        return TrainingBroken(
            f"{', '.join(odd)} cannot train with {self._names[self.source]}: their settings differ",
            hint="all trainers need the same n_epoch, the same names, shapes and dtypes of "
            "parameters, equal values of those that are not trained, and the same optimizer with "
            "the same options, after as many steps",
        )
