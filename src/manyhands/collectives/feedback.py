"""Feedback: what a sender keeps of values that its codec left out."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyhands.collectives.codecs import accumulator_of, codec_for, within
from manyhands.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence


class Feedback:
    """What a sender's codec left out of its parts, to be sent with the next contribution.

    Part k sends values + residual; what the wire does not carry of that becomes the residual,
    once the round has committed. So over many rounds all of the values arrive, late by the error
    of one encoding.

        encode(k) ... encode(k') ──▶ commit()   what they left out becomes the residual
                                └──▶ abandon()  nothing has happened

    `encode` only notes what was sent, so doing it again for the same attempt gives the same
    bytes, and for another attempt replaces them. A part that is not encoded (absent, of weight 0)
    keeps its residual.

    Where the wire cannot tell how much of a value arrived (it or its int8 block is not finite),
    and where a value saturated, the residual stays as it was: nothing of it is lost to an inf,
    and what clipping cut off does not pile up.

    Memory: an accumulator and what was sent for each part that was encoded, and room for one part
    for each thread; none for parts whose codec is raw. For int8 of float32 that is 1.26 times the
    tensors: it is state, like an optimizer's, and stays as long. Threads may encode different parts
    at once; the other methods need that no encoding is under way.
    """

    def __init__(self, name: str, parts: Sequence[tuple[int, torch.dtype]]) -> None:
        """For `parts` given by their number of values and dtype. Raises like `find_codec`."""
        self._parts = tuple(parts)
        self._codecs = tuple(codec_for(name, dtype) for _, dtype in parts)
        self._current: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}
        self._spare: dict[int, Tensor] = {}  # memory for what will be sent
        self._rooms: list[Tensor] = []  # to work in, one for each thread that does

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        held = (*self._current.values(), *self._sent.values(), *self._spare.values(), *self._rooms)
        return sum(tensor.nbytes for tensor in held)

    @torch.no_grad()
    def compensate(self, k: int, values: Tensor) -> Tensor:
        """`values` + residual of part k, as `encode` sends it; `values` itself for a raw part."""
        if self._codecs[k].raw:
            return values
        return self._compensate(k, values, self._new(k, values))

    @torch.no_grad()
    def encode(self, k: int, values: Tensor, wire: Tensor) -> None:
        """Write `values` + residual of part k to `wire`, which is then what was sent of it."""
        codec = self._codecs[k]
        if codec.raw:
            codec.encode(values, wire)
            return
        # Out of the way before anything can fail: never commit what was not sent.
        sent = self._sent.pop(k, None)
        if sent is None:
            sent = self._spare.pop(k, None)
        with self._room(k, values) as room:
            codec.encode(self._compensate(k, values, room), wire)
        self._sent[k] = wire.clone() if sent is None else sent.copy_(wire)

    @torch.no_grad()
    def commit(self, values: Callable[[int], Tensor]) -> None:
        """The attempt counts: what was left out of it is sent with the next.

        `values(k)` are those that part k was encoded from. They are asked for again, because
        keeping what was left out of each attempt would take as much memory as the values do.
        """
        for k, sent in self._sent.items():
            codec, given, before = self._codecs[k], values(k), self._current.get(k)
            with self._room(k, given) as room:
                rest = self._compensate(k, given, room)
                codec.add(sent, rest, sign=-1)
                if not within(rest, codec.max_error):
                    kept = torch.zeros_like(rest) if before is None else before
                    rest = torch.where(rest.abs() <= codec.max_error, rest, kept)
                self._current[k] = rest.clone() if before is None else before.copy_(rest)
        self.abandon()

    def abandon(self) -> None:
        """The attempt does not count, or no longer: forget what was sent in it."""
        self._spare.update(self._sent)
        self._sent.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the residuals, by part; an attempt under way does not count."""
        return {str(k): self._current[k].clone() for k in sorted(self._current)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by copies of those in `state`; parts not in it have none.

        An attempt under way is abandoned. Raises UsageError, before anything is changed, when
        `state` is not of these parts.
        """
        known = {str(k): k for k, codec in enumerate(self._codecs) if not codec.raw}
        for key, tensor in state.items():
            if key not in known:
                raise UsageError(f"a residual of part {key!r}, which has none here")
            numel, dtype = self._parts[known[key]]
            if tensor.shape != (numel,) or tensor.dtype is not accumulator_of(dtype):
                raise UsageError(
                    f"part {key}: a residual of {tuple(tensor.shape)} {tensor.dtype}, not of "
                    f"({numel},) {accumulator_of(dtype)}",
                    hint="load the state of a run with the same parts",
                )
        self.abandon()
        self._spare.clear()
        self._rooms.clear()
        self._current = {known[key]: tensor.detach().clone() for key, tensor in state.items()}

    @contextlib.contextmanager
    def _room(self, k: int, values: Tensor) -> Generator[Tensor]:
        numel, dtype = self._parts[k][0], accumulator_of(self._parts[k][1])
        room = self._rooms.pop() if self._rooms else None
        if room is None or (room.dtype, room.device) != (dtype, values.device):
            room = self._new(k, values)
        if room.numel() < numel:
            room = self._new(k, values)
        yield room[:numel]
        self._rooms.append(room)

    def _new(self, k: int, values: Tensor) -> Tensor:
        dtype = accumulator_of(self._parts[k][1])
        return torch.empty(self._parts[k][0], dtype=dtype, device=values.device)

    def _compensate(self, k: int, values: Tensor, out: Tensor) -> Tensor:
        if values.shape != out.shape:
            raise UsageError(f"{tuple(values.shape)} values for part {k} of {out.numel()}")
        before = self._current.get(k)
        if before is None:
            return out.copy_(values)
        torch.add(values, before, out=out)
        # A residual must not push a finite value over the edge of its dtype.
        if not math.isfinite(float(out.sum())):
            out.copy_(torch.where(out.isfinite(), out, values))
        return out
