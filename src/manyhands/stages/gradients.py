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
        self._parameters = [p for p in every if id(p) not in others]
        buffers = {
            id(buffer): (module, name)
            for root in modules
            for module in root.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if id(buffer) not in others
        }
        self._places = list(buffers.values())  # a layer may put another tensor there
        self._noted: list[Tensor] = []

    @torch.no_grad()
    def equalize(self) -> None:
        """Everybody gets the values of the stage's first peer."""
        for tensor in [*self._parameters, *self._buffers()]:
            flat = tensor.detach().clone(memory_format=torch.contiguous_format)
            # As bytes: gloo has no broadcast of some types.
            as_bytes = flat.reshape(-1).view(torch.uint8)
            self._carrier.spread(as_bytes, self._lead, self._peers).wait()
            tensor.copy_(flat)
        self.note()

    def note(self) -> None:
        """The buffers are the same on all peers, as they are now.

        Their values are kept: torch does not count what a batch norm writes.
        """
        self._noted = [buffer.clone() for buffer in self._floats()]

    @torch.no_grad()
    def sum(self, share: float) -> None:
        """Add up all peers' gradients; buffers that were written to become their mean, weighted by
        `share` of the rows.

        A parameter that nobody has a gradient for keeps none.
        """
        waiting: list[tuple[Sum, Pending]] = []
        for bucket in buckets([p for p in self._parameters if p.requires_grad]):
            total = Sum(bucket)
            waiting.append((total, self._carrier.sum(total.flat, self._peers)))
        means = [
            # A peer without rows has nothing to say, not even 0 * inf.
            (buffer, buffer * share if share else torch.zeros_like(buffer))
            for buffer in self._written()
        ]
        pending = [self._carrier.sum(mean, self._peers) for _, mean in means]
        for total, work in waiting:
            work.wait()
            total.give_back()
        for (buffer, mean), work in zip(means, pending, strict=True):
            work.wait()
            buffer.copy_(mean)
        self.note()

    def _written(self) -> list[Tensor]:
        """Those that some peer has changed since they were the same: constants stay as they are."""
        floats = self._floats()
        if not floats:
            return []
        new = [(b != noted).any() for b, noted in zip(floats, self._noted, strict=True)]
        counts = torch.stack(new).to(self._carrier.words_on, torch.float32)
        self._carrier.sum(counts, self._peers).wait()
        there = cast("list[float]", counts.tolist())  # pyright: ignore[reportUnknownMemberType]
        return [buffer for buffer, count in zip(floats, there, strict=True) if count]

    def _floats(self) -> list[Tensor]:
        return [buffer for buffer in self._buffers() if buffer.is_floating_point()]

    def _buffers(self) -> list[Tensor]:
        return [cast("Tensor", getattr(module, name)) for module, name in self._places]


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
                piece.copy_(parameter.grad.to_dense().reshape(-1))
                self._there[index] = 1

    def give_back(self) -> None:
        """Put the sums where the gradients were."""
        there = cast("list[float]", self._there.tolist())  # pyright: ignore[reportUnknownMemberType]
        for parameter, piece, count in zip(self._parameters, self._pieces, there, strict=True):
            if not count:
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
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


def dense(gradient: Tensor) -> Tensor:
    """As plain numbers, for their squares."""
    gradient = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def unique(tensors: Iterable[T]) -> list[T]:
    """Each once: layers may share them."""
    return list({id(tensor): tensor for tensor in tensors}.values())
