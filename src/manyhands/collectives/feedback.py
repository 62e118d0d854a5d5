"""Feedback: what a codec left out, to be sent with the next values."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyhands.collectives.codecs import KEPT, accumulator_of, codec_for, within
from manyhands.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


class Feedback:
    """What one peer's codec left out of each part, to be sent with the next.

    Of a part that another adds up: of this peer's contribution. Of one that it adds up itself: of
    the sum, whose rounding would else lose whatever is less than half a step of it. Both are owed
    to the sum of all contributions, so it does not matter if the part gets another owner.

        encode(k)          a contribution, and what was owed with it ─┬─▶ commit()   it is owed now
        compensate, owe    a sum, and what was owed with it          ─┴─▶ abandon()  it never was

    So over many rounds all of the values arrive, late by the error of one encoding. The last call
    for a part counts, and doing it again for the same attempt gives the same bytes. A part that is
    neither (absent, of weight 0) keeps its residual.

    Where the wire cannot tell how much of a value arrived (it or its int8 block is not finite),
    and where a value saturated, the residual stays as it was: nothing of it is lost to an inf,
    and what clipping cut off does not pile up.

    Memory: a residual is kept in int16, by blocks, to 2^-16 of the largest of its block; that of a
    sum twice until the round is over. For float32 that is half of the tensors, and a quarter with
    two members: state, like an optimizer's, that stays as long. And room for one part for each
    thread. None for parts whose codec is raw. Threads may encode different parts at once; the other
    methods need that no encoding is under way.
    """

    def __init__(self, name: str, parts: Sequence[tuple[int, torch.dtype]]) -> None:
        """For `parts` given by their number of values and dtype. Raises like `find_codec`."""
        self._parts = tuple(parts)
        self._codecs = tuple(codec_for(name, dtype) for _, dtype in parts)
        self._current: dict[int, Tensor] = {}
        self._sent: set[int] = set()
        self._pending: dict[int, Tensor] = {}  # residuals of sums, if the attempt counts
        self._spare: dict[int, Tensor] = {}  # memory for those
        self._rooms: list[Tensor] = []  # to work in, of any part
        self._room_bytes = max((self._most_bytes(k) for k in range(len(parts))), default=0)

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        kept = (*self._current.values(), *self._pending.values(), *self._spare.values())
        return sum(tensor.nbytes for tensor in (*kept, *self._rooms))

    @torch.no_grad()
    def residual(self, k: int) -> Tensor:
        """What part k still owes, as its accumulator has it."""
        numel, dtype = self._parts[k]
        kept = self._current.get(k)
        if kept is None:
            return torch.zeros(numel, dtype=accumulator_of(dtype))
        owed = torch.empty(numel, dtype=accumulator_of(dtype), device=kept.device)
        KEPT.decode(kept, owed)
        return owed

    # -- a contribution ---------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, k: int, values: Tensor, wire: Tensor) -> None:
        """Write `values` + residual of part k to `wire`, which is then what was sent of it."""
        codec = self._codecs[k]
        if codec.raw:
            codec.encode(values, wire)
            return
        self._forget(k)  # before anything can fail: never commit what was not sent
        with self._room(values.device) as room:
            codec.encode(self._with_residual(k, values, room), wire)
        self._sent.add(k)

    # -- a sum ------------------------------------------------------------------------------------

    @torch.no_grad()
    def compensate(self, k: int, total: Tensor) -> bool:
        """total += residual of part k, which this peer adds up.

        False if it has values that are not finite, or would not be: the residual stays as it was.
        """
        if not within(total, torch.finfo(total.dtype).max / 2):
            self._forget(k)
            return False
        if (before := self._current.get(k)) is not None:
            KEPT.add(before, total)
        return True

    @torch.no_grad()
    def owe(self, k: int, rest: Tensor) -> None:
        """`rest` of that total is not in what was sent of it, and is owed if the attempt counts."""
        self._forget(k)
        wire = self._spare.pop(k, None)
        wire = self._bytes_for(k, rest) if wire is None else wire
        KEPT.encode(self._checked(k, rest), wire)
        self._pending[k] = wire

    # -- the attempt ------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, values: Callable[[int], Tensor]) -> None:
        """The attempt counts: what was left out of it is sent with the next.

        `values(k)` are those that part k was encoded from. They are asked for, and encoded, again:
        keeping what was sent of each attempt would take a quarter of their memory.
        """
        for k in self._sent:
            codec, given = self._codecs[k], values(k)
            with self._room(given.device) as room, self._room(given.device) as wire:
                rest = self._with_residual(k, given, room)
                sent = wire[: codec.num_bytes(*self._parts[k])]
                codec.encode(rest, sent)
                codec.add(sent, rest, sign=-1)
                rest = self._checked(k, rest)
                if k not in self._current:
                    self._current[k] = self._bytes_for(k, rest)
                KEPT.encode(rest, self._current[k])
        self._sent.clear()
        if self._pending:  # room for the sums of these parts, which are most often the next ones
            self._spare = {k: self._current[k] for k in self._pending if k in self._current}
        self._current.update(self._pending)
        self._pending.clear()

    def abandon(self) -> None:
        """The attempt does not count, or no longer: nothing has happened."""
        self._sent.clear()
        self._spare.update(self._pending)
        self._pending.clear()

    def _forget(self, k: int) -> None:
        self._sent.discard(k)
        if k in self._pending:
            self._spare[k] = self._pending.pop(k)

    def _checked(self, k: int, rest: Tensor) -> Tensor:
        """With the residual that was, where the wire cannot tell."""
        most = self._codecs[k].max_error
        if within(rest, most):
            return rest
        return torch.where(rest.abs() <= most, rest, self.residual(k).to(rest.device))

    def _with_residual(self, k: int, values: Tensor, room: Tensor) -> Tensor:
        numel, dtype = self._parts[k][0], accumulator_of(self._parts[k][1])
        if values.shape != (numel,):
            raise UsageError(f"{tuple(values.shape)} values for part {k} of {numel}")
        out = room[: numel * dtype.itemsize].view(dtype).copy_(values)
        if (before := self._current.get(k)) is not None:
            KEPT.add(before, out)
            # A residual must not push a finite value over the edge of its dtype.
            if not math.isfinite(float(out.sum())):
                out.copy_(torch.where(out.isfinite(), out, values))
        return out

    # -- memory -----------------------------------------------------------------------------------

    def _most_bytes(self, k: int) -> int:
        """Of part k, as a total or on the wire."""
        numel, dtype = self._parts[k]
        total_bytes = numel * accumulator_of(dtype).itemsize
        return max(total_bytes, self._codecs[k].num_bytes(numel, dtype))

    @contextlib.contextmanager
    def _room(self, device: torch.device) -> Generator[Tensor]:
        try:
            room = self._rooms.pop()
        except IndexError:  # none yet, or other threads have all of them
            room = None
        if room is None or room.device != device:
            room = _new(self._room_bytes, device)
        yield room
        self._rooms.append(room)

    def _bytes_for(self, k: int, values: Tensor) -> Tensor:
        return _new(KEPT.num_bytes(*self._parts[k]), values.device)


def _new(num_bytes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the next one to use it may be outside of it
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
