"""Buffer: the gradients of all devices, side by side, and what puts them together.

A slot is one device's part. Names are those of the model's parameters; the model's own buffers
(BatchNorm's statistics) go the same way, so that replicas do not drift apart in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from manyhands.compat.fluxdistributed.errors import NotSynced
from manyhands.compat.fluxdistributed.hands import run_hands
from manyhands.compat.fluxdistributed.kept import Kept, tensors_of
from manyhands.compat.fluxdistributed.layout import Layout, layout_of, views_of
from manyhands.core.errors import UsageError
from manyhands.stages.carrier import Carrier

Reduce = Literal["mean", "sum"] | Callable[[list[Tensor]], Tensor]


class Slot:
    """The gradients of one device, of `count` samples. Used by one thread at a time."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._views = views_of(layout, device)
        self.count = 0
        self.used = [False] * len(layout.leaves)

    def __getitem__(self, name: str) -> Tensor:
        return self._views.leaves[name]

    @torch.no_grad()
    def mark(self, model: nn.Module, count: int, before: Kept) -> None:
        """Copy the model's gradients in, and of its buffers those that are not as `before`.

        A parameter without a gradient counts as zero, and so does everything if `count` is 0.
        """
        tensors = tensors_of(model)
        changed = before.changed(model) if count else set[str]()
        self.count = count
        for place, leaf in enumerate(self.layout.leaves):
            tensor, value = tensors[leaf.name], None
            if count and leaf.gradient:
                value = tensor.grad
            elif leaf.name in changed:
                value = tensor
            self.used[place] = value is not None
            if value is not None:
                self[leaf.name].copy_(value.to_dense() if value.is_sparse else value)
            elif leaf.summed:
                self[leaf.name].zero_()

    @torch.no_grad()
    def weigh(self, weight: float, *, first: bool) -> None:
        """Make this slot's part of the whole; what cannot be averaged is the `first` device's."""
        for flat in self._views.flats.values():
            if not flat.is_floating_point():
                if not first:
                    flat.zero_()
            elif weight == 0:
                flat.zero_()  # infinities times zero would be none
            elif weight != 1:
                flat.mul_(weight)

    def add_up(self, carrier: Carrier, used: Sequence[bool]) -> None:
        """The sum over all devices; all of them call it, with the same `used`."""
        peers = range(carrier.size)
        pending = [
            carrier.sum(self._views.flats[dtype], peers) for dtype in self.layout.moved(used)
        ]
        for work in pending:
            work.wait()
        self.used = list(used)

    @torch.no_grad()
    def show(self, model: nn.Module) -> None:
        """Give the model what is here: as gradients (not copies), and as buffers."""
        tensors = tensors_of(model)
        for leaf, used in zip(self.layout.leaves, self.used, strict=True):
            if leaf.gradient:
                tensors[leaf.name].grad = self[leaf.name] if used else None
            elif used:
                tensors[leaf.name].copy_(self[leaf.name])

    def gradients(self) -> dict[str, Tensor]:
        """Those that are used, by name; not copies."""
        return {
            leaf.name: self[leaf.name]
            for leaf, used in zip(self.layout.leaves, self.used, strict=True)
            if leaf.gradient and used
        }


class Buffer(Sequence[Slot]):
    """One slot for each device, in their order. `prepare_training` makes it."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.layout = layout_of(model)
        self._slots = [Slot(self.layout, device) for device in devices]

    @overload
    def __getitem__(self, index: int, /) -> Slot: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Slot]: ...
    def __getitem__(self, index: int | slice, /) -> Slot | list[Slot]:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)


def sync_buffer(buffer: Buffer, reduce: Reduce = "mean") -> dict[str, Tensor]:
    """Put the gradients of all slots together; every slot then holds the result, to the bit.

    "mean" weighs each device by the samples that it had: the gradient of the pooled batch. A
    callable gets the tensors of all slots, one leaf at a time, on the first slot's device.
    Returns copies, by parameter; one that had no gradient on any device is left out.
    """
    total = sum(slot.count for slot in buffer)
    if not total:
        raise UsageError("no slot has gradients", hint="call train_step for the devices first")
    used = [any(flags) for flags in zip(*(slot.used for slot in buffer), strict=True)]
    if callable(reduce):
        return _reduced_by(buffer, reduce, used)
    if reduce not in ("mean", "sum"):
        raise UsageError(f"reduce={reduce!r}", hint='"mean", "sum", or a function of tensors')

    def put_together(rank: int, carrier: Carrier) -> None:
        slot = buffer[rank]
        slot.weigh(slot.count / total if reduce == "mean" else 1.0, first=rank == 0)
        slot.add_up(carrier, used)

    run_hands([slot.device for slot in buffer], put_together)
    return {name: tensor.clone() for name, tensor in buffer[0].gradients().items()}


@torch.no_grad()
def _reduced_by(
    buffer: Buffer, reduce: Callable[[list[Tensor]], Tensor], used: list[bool]
) -> dict[str, Tensor]:
    home, final = buffer[0].device, dict[str, Tensor]()
    for leaf, is_used in zip(buffer.layout.leaves, used, strict=True):
        if leaf.gradient and is_used:
            made = reduce([slot[leaf.name].to(home) for slot in buffer])
            final[leaf.name] = made.clone()
            for slot in buffer:
                slot[leaf.name].copy_(final[leaf.name])
    for slot in buffer:
        slot.used = list(used)
    return final


def ensure_synced(buffer: Buffer, final: Mapping[str, Tensor]) -> None:
    """Every slot holds `final`, to the bit. Raises NotSynced, with slot and name, if not."""
    for rank, slot in enumerate(buffer):
        held = slot.gradients()
        if odd := sorted(held.keys() ^ final.keys()):
            raise NotSynced(f"slot {rank} ({slot.device}) and the result differ in having {odd[0]}")
        for name, tensor in final.items():
            if not same_bits(held[name], tensor):
                raise NotSynced(
                    f"{name} in slot {rank} ({slot.device}) is not the result of sync_buffer",
                    hint="call train_step, sync_buffer and update in this order, for all devices",
                )


def check_nans(tree: Any) -> bool:  # noqa: ANN401
    """Whether there is a NaN in a tensor, or in any of a dict or list of them (None is none)."""
    if isinstance(tree, Tensor):
        return bool(tree.isnan().any()) if tree.is_floating_point() else False
    if isinstance(tree, Slot):
        return check_nans(tree.gradients())
    if isinstance(tree, Mapping):
        return any(map(check_nans, cast("Mapping[Any, Any]", tree).values()))
    if isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        return any(map(check_nans, cast("Sequence[Any]", tree)))
    if tree is None or isinstance(tree, int | float | complex):
        return tree != tree
    raise UsageError(f"a {type(tree).__name__} has no leaves to look at")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, NaNs too."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    ours, theirs = (t.detach().cpu().contiguous().flatten() for t in (one, other))
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
