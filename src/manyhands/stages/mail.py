"""Mail: one peer's end of a step's traffic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.stages.carrier import Carrier, Pending
from manyhands.stages.course import Course, Duty
from manyhands.stages.traffic import Message
from manyhands.wire.tensors import dtype_named


class _Coming(NamedTuple):
    tensor: Tensor
    pending: Pending


class Mail:
    """Receives are asked for in the order in which they are sent, a few actions ahead of use."""

    def __init__(self, carrier: Carrier, course: Course, device: torch.device) -> None:
        self._carrier, self._device = carrier, device
        self._traffic, self._places = course.traffic, course.places
        self._me = carrier.rank
        self._asked: dict[int, int] = {}  # by sender: how many of its messages were asked for
        self._coming: dict[Message, _Coming] = {}
        self._own: dict[Message, Tensor] = {}  # from this peer to itself
        self._sent: dict[int, list[tuple[Message, Pending]]] = {}  # by target: what it may lack

    def expect(self, duties: Iterable[Duty]) -> None:
        """Ask for all that these need, so that it comes while others compute."""
        for duty in duties:
            for message in duty.awaited:
                self._ask(message)

    def _ask(self, message: Message) -> None:
        line = self._traffic.lines[message.source, self._me]
        start = self._asked.get(message.source, 0)
        end = self._places[message] + 1
        for earlier in line[start:end]:
            kind = earlier.value.kind
            shape = kind.shape if kind.whole else (len(earlier.rows), *kind.shape)
            tensor = torch.empty(shape, dtype=dtype_named(kind.dtype), device=self._device)
            pending = self._carrier.receive(tensor, message.source)
            self._coming[earlier] = _Coming(tensor, pending)
        self._asked[message.source] = max(start, end)

    def take(self, message: Message) -> Tensor:
        """What was sent; waits for it. Raises what the carrier raises."""
        if message.source == self._me:
            return self._own.pop(message)
        self._ask(message)
        tensor, pending = self._coming.pop(message)
        pending.wait()
        self._release(message)
        return tensor

    def _release(self, heard: Message) -> None:
        """Let go of what must have arrived: activations are not to be kept for a whole step."""
        left: list[tuple[Message, Pending]] = []
        for sent, going in self._sent.get(heard.source, ()):
            if self._traffic.has_arrived(sent, heard):
                going.wait()
            else:
                left.append((sent, going))
        self._sent[heard.source] = left

    def put(self, message: Message, tensor: Tensor) -> None:
        """Send it."""
        if message.target == self._me:
            self._own[message] = tensor.detach()
        else:
            going = self._carrier.send(tensor, message.target)
            self._sent.setdefault(message.target, []).append((message, going))

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for _, going in (sent for line in self._sent.values() for sent in line):
            going.wait()
        self._sent.clear()
