"""Gradients of a stage on several peers: each has those of its rows, all need their sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from manyhands.stages.carrier import Carrier, Pending

T = TypeVar("T", bound=Tensor)
BUCKET_BYTES = 32 << 20


class Shared:
    """The parameters and buffers of one wide stage, the same on all of its peers.

    What the modules `besides` have too is left to their stage: added up twice, it would be doubled.
    """

    def __init__(
        self,
        carrier: Carrier,
        peers: Sequence[int],
        lead: int,
        modules: Sequence[nn.Module],
        *,
        besides: Sequence[nn.Module] = (),
    ) -> None:
        self._carrier, self._peers, self._lead = carrier, tuple(peers), lead
        others = {id(t) for m in besides for t in (*m.parameters(), *m.buffers())}
        every = unique(p for module in modules for p in module.parameters())
        self._all = [p for p in every if id(p) not in others]
        self._parameters = [p for p in self._all if p.requires_grad]
        buffers = unique(b for module in modules for b in module.buffers())
        self._buffers = [b for b in buffers if id(b) not in others]

    @torch.no_grad()
    def equalize(self) -> None:
        """Everybody gets the values of the stage's first peer."""
        for tensor in [*self._all, *self._buffers]:
            flat = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._carrier.spread(flat, self._lead, self._peers).wait()
            tensor.copy_(flat)

    @torch.no_grad()
    def sum(self, share: float) -> None:
        """Add up all peers' gradients; buffers become their mean, weighted by `share` of the rows.

        A parameter that nobody has a gradient for keeps none.
        """
        waiting: list[tuple[Sum, Pending]] = []
        for bucket in buckets(self._parameters):
            total = Sum(bucket)
            waiting.append((total, self._carrier.sum(total.flat, self._peers)))
        floats = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        means = [(buffer, buffer * share) for buffer in floats]
        pending = [self._carrier.sum(mean, self._peers) for _, mean in means]
        for total, work in waiting:
            work.wait()
            total.give_back()
        for (buffer, mean), work in zip(means, pending, strict=True):
            work.wait()
            buffer.copy_(mean)


class Sum:
    """One bucket as a flat tensor: the gradients, then for each whether there is one."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        first = parameters[0]
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(
            sum(sizes) + len(parameters), dtype=first.dtype, device=first.device
        )
        pieces = torch.split(self.flat, [*sizes, len(parameters)])
        self._pieces, self._there = pieces[:-1], pieces[-1]
        for index, (parameter, piece) in enumerate(zip(parameters, self._pieces, strict=True)):
            if parameter.grad is not None:
                piece.copy_(parameter.grad.reshape(-1))
                self._there[index] = 1

    def give_back(self) -> None:
        """Put the sums where the gradients were."""
        there = cast("list[float]", self._there.tolist())  # pyright: ignore[reportUnknownMemberType]
        for parameter, piece, count in zip(self._parameters, self._pieces, there, strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(piece.view_as(parameter))


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """By dtype and device, in order, each of at most BUCKET_BYTES or one parameter."""
    kinds = dict.fromkeys((p.dtype, p.device) for p in parameters)
    for kind in kinds:
        bucket: list[nn.Parameter] = []
        room = BUCKET_BYTES
        for parameter in parameters:
            if (parameter.dtype, parameter.device) != kind:
                continue
            if bucket and parameter.nbytes > room:
                yield bucket
                bucket, room = [], BUCKET_BYTES
            bucket.append(parameter)
            room -= parameter.nbytes
        if bucket:
            yield bucket


def unique(tensors: Iterable[T]) -> list[T]:
    """Each once: layers may share them."""
    return list({id(tensor): tensor for tensor in tensors}.values())
