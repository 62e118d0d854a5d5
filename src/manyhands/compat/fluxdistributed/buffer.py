"""Buffer: the gradients of all devices, side by side, and what puts them together.

A layout says where each tensor of a model lies in a few flat ones; a slot is one device's part of
it. Names are those of the model's parameters; the model's own buffers (BatchNorm's statistics) go
the same way, so that replicas do not drift apart in them: all that a step changes on one device
must be the same on the others afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, overload

import msgspec
import torch
from torch import Tensor, nn

from manyhands.compat.fluxdistributed.errors import NotSynced
from manyhands.compat.fluxdistributed.hands import run_hands
from manyhands.core.errors import UsageError
from manyhands.stages.carrier import Carrier
from manyhands.wire.tensors import DTYPES

Reduce = Literal["mean", "sum"] | Callable[[list[Tensor]], Tensor]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Leaf(msgspec.Struct, frozen=True):
    """One tensor: its place in the flat one of its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    gradient: bool  # of a parameter; else a buffer
    summed: bool  # by weight; else it is the value of one device that has changed it


class Layout(msgspec.Struct, frozen=True):
    """The leaves of a model; the same on all devices, and small enough to be told to others."""

    leaves: tuple[Leaf, ...]

    @property
    def flats(self) -> dict[str, int]:
        """The number of elements of the flat tensor of each dtype."""
        sizes: dict[str, int] = {}
        for leaf in self.leaves:
            sizes[leaf.dtype] = leaf.start + leaf.numel
        return sizes

    @property
    def given(self) -> list[int]:
        """Places of the leaves that cannot be averaged."""
        return [place for place, leaf in enumerate(self.leaves) if not leaf.summed]

    def start_of_buffers(self, dtype: str) -> int:
        """Where in the flat tensor of a dtype the gradients end: they come first."""
        return sum(leaf.numel for leaf in self.leaves if leaf.gradient and leaf.dtype == dtype)

    def moved(self, used: Sequence[bool]) -> list[str]:
        """The dtypes whose flat tensors must be put together, when these leaves were used."""
        wanted = {leaf.dtype for leaf, is_used in zip(self.leaves, used, strict=True) if is_used}
        return [dtype for dtype in self.flats if dtype in wanted]


class Views(NamedTuple):
    """Flat tensors on one device, and the leaves in them."""

    flats: dict[str, Tensor]
    leaves: dict[str, Tensor]


def layout_of(model: nn.Module) -> Layout:
    """Of the parameters that are trained, and all buffers."""
    sizes: dict[str, int] = {}
    leaves: list[Leaf] = []

    def add(name: str, tensor: Tensor, *, gradient: bool) -> None:
        # Bools are carried as bytes: nothing adds them up.
        kind = torch.uint8 if tensor.dtype is torch.bool else tensor.dtype
        dtype = str(kind).removeprefix("torch.")
        start = sizes.get(dtype, 0)
        sizes[dtype] = start + tensor.numel()
        shape = tuple(tensor.shape)
        summed = tensor.is_floating_point() or tensor.is_complex()
        leaves.append(Leaf(name, dtype, shape, start, tensor.numel(), gradient, summed))

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            add(name, parameter, gradient=True)
    for name, buffer in model.named_buffers():
        add(name, buffer, gradient=False)
    return Layout(tuple(leaves))


def views_of(layout: Layout, device: torch.device) -> Views:
    """Zeros for all leaves on this device."""
    flats = {
        dtype: torch.zeros(numel, dtype=DTYPES[dtype], device=device)
        for dtype, numel in layout.flats.items()
    }
    leaves = {
        leaf.name: flats[leaf.dtype][leaf.start : leaf.start + leaf.numel].view(leaf.shape)
        for leaf in layout.leaves
    }
    return Views(flats, leaves)


class Kept:
    """BatchNorm writes its statistics in forward: what is undone must undo them, too."""

    def __init__(self) -> None:
        self._was: dict[str, Tensor] = {}

    def take(self, model: nn.Module) -> None:
        """Copies of the buffers. Where memory runs out meanwhile, the model is as it was, and what
        is missing can be taken later, before anything changes it.
        """
        for name, buffer in model.named_buffers():
            if name not in self._was:
                self._was[name] = buffer.detach().clone()

    def changed(self, model: nn.Module) -> set[str]:
        """The names of buffers that are not as they were, to the bit.

        torch's count of writes does not tell: batch_norm's go uncounted.
        """
        flags: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
        for name, buffer in model.named_buffers():
            differs = (_bits(buffer) != _bits(self._was[name])).any()
            flags[buffer.device][name] = differs
        names: set[str] = set()
        for some in flags.values():  # one wait for each device
            found = cast("list[bool]", torch.stack(list(some.values())).tolist())  # pyright: ignore[reportUnknownMemberType]
            names |= {name for name, differs in zip(some, found, strict=True) if differs}
        return names

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """The buffers as they were, and no gradients."""
        for name, buffer in model.named_buffers():
            if name in self._was:  # else nothing has been done yet
                buffer.copy_(self._was[name])
        for parameter in model.parameters():
            parameter.grad = None


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def real(tensor: Tensor) -> Tensor:
    """The same memory, as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: Tensor) -> Tensor:
    """For comparison: of floats, a NaN is equal to itself, and 0 is not -0."""
    plain = real(tensor.detach())
    return plain.view(_INTS[plain.element_size()]) if plain.is_floating_point() else plain


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
        """Copy the model's gradients and buffers in; a buffer is used if it is not as `before`.

        A parameter without a gradient counts as zero, and so does everything if `count` is 0. A
        buffer that this device has left alone counts as it is: another one may have changed it.
        """
        tensors = tensors_of(model)
        changed = before.changed(model) if count else set[str]()
        self.count = count
        for place, leaf in enumerate(self.layout.leaves):
            tensor = tensors[leaf.name]
            value = tensor.grad if leaf.gradient else tensor
            if not count or value is None:
                self.used[place] = False
                self[leaf.name].zero_()
            else:
                self.used[place] = leaf.gradient or leaf.name in changed
                self[leaf.name].copy_(value.to_dense() if value.is_sparse else value)

    def clear(self) -> None:
        """No samples: it adds nothing to the whole."""
        self.count, self.used = 0, [False] * len(self.layout.leaves)
        for flat in self._views.flats.values():
            flat.zero_()

    @torch.no_grad()
    def weigh(
        self, weight: float, giving: Collection[int], *, gradients: float | None = None
    ) -> None:
        """Make this slot's part of the whole: its values times `weight`, `gradients` times theirs
        if that is another one. What cannot be averaged is one device's: leaves at places `giving`
        are this one's.
        """
        for dtype, flat in self._views.flats.items():
            if not (flat.is_floating_point() or flat.is_complex()):
                continue
            if gradients is None:
                _scale(flat, weight)
            else:
                start = self.layout.start_of_buffers(dtype)
                _scale(flat[:start], gradients)
                _scale(flat[start:], weight)
        for place in self.layout.given:
            if place not in giving:
                self[self.layout.leaves[place].name].zero_()

    def add_up(self, carrier: Carrier, used: Sequence[bool]) -> None:
        """The sum over all devices; all of them call it, with the same `used`."""
        peers = range(carrier.size)
        flats = [self._views.flats[dtype] for dtype in self.layout.moved(used)]
        pending = [carrier.sum(real(flat).view(-1), peers) for flat in flats]
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

    @property
    def marks(self) -> list[bool]:
        """For each leaf that cannot be averaged, whether this device has changed it."""
        return [self.used[place] for place in self.layout.given]

    def gradients(self) -> dict[str, Tensor]:
        """Those that are used, by name; not copies."""
        return self._used(gradient=True)

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that are used, by name; not copies."""
        return self._used(gradient=False)

    def _used(self, *, gradient: bool) -> dict[str, Tensor]:
        return {
            leaf.name: self[leaf.name]
            for leaf, used in zip(self.layout.leaves, self.used, strict=True)
            if leaf.gradient is gradient and used
        }


def _scale(flat: Tensor, weight: float) -> None:
    if weight == 0:
        flat.zero_()  # infinities times zero would be none
    elif weight != 1:
        flat.mul_(weight)


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


class Final(dict[str, Tensor]):
    """What `sync_buffer` returns: gradients by parameter, for `update`.

    `buffers` are the model's own (BatchNorm's statistics), where a device has changed them: the
    mean over the devices, which `update` gives every replica.
    """

    def __init__(self, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        super().__init__(gradients)
        self.buffers = dict(buffers)


def sync_buffer(buffer: Buffer, reduce: Reduce = "mean") -> Final:
    """Put the gradients of all slots together; every slot then holds the result, to the bit.

    "mean" weighs each device by the samples that it had: the gradient of the pooled batch. A
    callable gets the tensors of all slots, one leaf at a time, on the first slot's device. Of the
    model's buffers it is the mean, whatever `reduce` is; of those that have none (a count) the
    value of the first device that has changed it. Returns copies, by parameter; one that had no
    gradient on any device is left out.
    """
    if not sum(slot.count for slot in buffer):
        raise UsageError("no slot has gradients", hint="call train_step for the devices first")
    for slot in buffer:
        if not slot.count:
            slot.clear()  # it may hold what was put together before
    used = [any(flags) for flags in zip(*(slot.used for slot in buffer), strict=True)]
    if callable(reduce):
        _reduce_by(buffer, reduce, used)
    elif reduce in ("mean", "sum"):
        _add_up(buffer, used, gradients=1.0 if reduce == "sum" else None)
    else:
        raise UsageError(f"reduce={reduce!r}", hint='"mean", "sum", or a function of tensors')
    first = buffer[0]
    return Final(
        {name: tensor.clone() for name, tensor in first.gradients().items()},
        {name: tensor.clone() for name, tensor in first.buffers().items()},
    )


def _add_up(buffer: Buffer, used: list[bool], *, gradients: float | None) -> None:
    total = sum(slot.count for slot in buffer)
    givers = givers_of(buffer.layout, [slot.marks for slot in buffer])

    def put_together(rank: int, carrier: Carrier) -> None:
        slot = buffer[rank]
        giving = [place for place, giver in givers.items() if giver == rank]
        slot.weigh(slot.count / total, giving, gradients=gradients)
        slot.add_up(carrier, used)

    run_hands([slot.device for slot in buffer], put_together)


@torch.no_grad()
def _reduce_by(buffer: Buffer, reduce: Callable[[list[Tensor]], Tensor], used: list[bool]) -> None:
    home, total = buffer[0].device, sum(slot.count for slot in buffer)
    givers = givers_of(buffer.layout, [slot.marks for slot in buffer])
    for place, leaf in enumerate(buffer.layout.leaves):
        if not used[place]:
            continue
        held = [slot[leaf.name].to(home) for slot in buffer]
        if leaf.gradient:
            made = reduce(held).clone()
        elif leaf.summed:
            weights = [slot.count / total for slot in buffer]
            parts = [tensor * w for tensor, w in zip(held, weights, strict=True) if w]
            made = torch.stack(parts).sum(0)
        else:
            made = held[givers[place]].clone()
        for slot in buffer:
            slot[leaf.name].copy_(made)
    for slot in buffer:
        slot.used = list(used)


def givers_of(layout: Layout, marks: Sequence[Sequence[float]]) -> dict[int, int]:
    """Of leaves that cannot be averaged, by place: the first rank that has changed it, if any has.

    `marks` are those of each rank, one for each of `layout.given`.
    """
    found: dict[int, int] = {}
    for rank, own in enumerate(marks):
        for place, mark in zip(layout.given, own, strict=True):
            if mark:
                found.setdefault(place, rank)
    return found


def ensure_synced(buffer: Buffer, final: Mapping[str, Tensor]) -> None:
    """Every slot holds `final`, to the bit. Raises NotSynced, with slot and name, if not."""
    wanted = dict(final) | (final.buffers if isinstance(final, Final) else {})
    for rank, slot in enumerate(buffer):
        held = slot.gradients() | (slot.buffers() if isinstance(final, Final) else {})
        if odd := sorted(held.keys() ^ wanted.keys()):
            raise NotSynced(f"slot {rank} ({slot.device}) and the result differ in having {odd[0]}")
        for name, tensor in wanted.items():
            if not same_bits(held[name], tensor):
                raise NotSynced(
                    f"{name} in slot {rank} ({slot.device}) is not the result of sync_buffer",
                    hint="call train_step, sync_buffer and update in this order, for all devices",
                )


def check_nans(tree: Any) -> bool:  # noqa: ANN401
    """Whether there is a NaN in a tensor, or in any of a dict or list of them (None is none)."""
    if isinstance(tree, Tensor):
        has_nans = tree.is_floating_point() or tree.is_complex()
        return bool(tree.isnan().any()) if has_nans else False
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
    ours, theirs = (real(t.detach().cpu().contiguous()).flatten() for t in (one, other))
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
