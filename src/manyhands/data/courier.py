"""Courier: batches to a device, on a stream of their own, while the device computes.

hand's thread      pinned(batch)             in memory that the device reads by itself
user's thread      sent = send(batch)        the copy begins; nobody waits
                   arrive(sent)              the user's stream waits for the copy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.core.errors import UsageError


class Sent(NamedTuple):
    """A batch on its way; `done` when it is there."""

    batch: Any
    done: torch.cuda.Event | None


class Courier:
    """To one device. To all but GPUs of CUDA the copy is made at once."""

    def __init__(self, device: str | int | torch.device) -> None:
        try:
            self.device = torch.device(device)
        except RuntimeError as error:  # torch's word for a name that is none
            raise UsageError(
                f"device={device!r}: {error}", hint='"cpu", "cuda", "cuda:1"'
            ) from None
        self._stream: torch.cuda.Stream | None = None
        if self.device.type != "cuda":
            return
        if not torch.cuda.is_available():
            raise UsageError(
                f"device={str(device)!r}, and torch finds no GPU of CUDA here",
                hint="leave device= out, or install a torch for this machine's driver",
            )
        if cast("int | None", self.device.index) is None:  # what is current now, whatever is later
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)

    @property
    def overlaps(self) -> bool:
        """Whether a copy can go on while the device computes."""
        return self._stream is not None

    def pinned(self, batch: Any) -> Any:  # noqa: ANN401
        """The batch where the device can read it by itself. From any thread."""
        if self._stream is None:
            return batch
        return _mapped(Tensor.pin_memory, batch, "cpu")

    def send(self, batch: Any) -> Sent:  # noqa: ANN401
        """Begin to copy it; of what is pinned nobody waits for that."""
        if self._stream is None:
            return Sent(_mapped(lambda t: t.to(self.device), batch), None)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            # The memory of the copies is this stream's. That of what is copied is not used again
            # before the copy is done: torch's pinned memory sees to it.
            moved = _mapped(lambda t: t.to(self.device, non_blocking=True), batch)
            done.record(self._stream)
        return Sent(moved, done)

    def arrive(self, sent: Sent) -> Any:  # noqa: ANN401
        """The batch; what the user's stream does with it comes after the copy.

        Things with a `to` of their own are moved here. Raises UsageError for others that have
        tensors in them: nobody knows how to move those.
        """
        if sent.done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.done)
            for leaf in tree_leaves(sent.batch):
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    # Let go of by the user, its memory must not be written to by the next copy
                    # while what the user has begun still reads it.
                    leaf.record_stream(current)
        return tree_map(self._moved, sent.batch)

    def _moved(self, leaf: Any) -> Any:  # noqa: ANN401
        """What is no tensor, and may have some. On the user's stream: of what such a thing holds
        no other stream could be told.
        """
        if isinstance(leaf, Tensor):
            return leaf
        held = _tensors_in(leaf)
        if callable(getattr(leaf, "to", None)) and (held or hasattr(leaf, "pin_memory")):
            return leaf.to(self.device)
        if any(tensor.device.type != self.device.type for tensor in held):
            raise UsageError(
                f"a batch has a {type(leaf).__name__}, and its tensors would stay where they are",
                hint=f"give {type(leaf).__name__} a method to(device), collate into lists, tuples "
                "and dicts, or leave device= out",
            )
        return leaf


def _tensors_in(thing: Any) -> list[Tensor]:  # noqa: ANN401
    """As far as they show: in what it maps to, or in its attributes."""
    held = cast("object", thing) if isinstance(thing, Mapping) else getattr(thing, "__dict__", {})
    values = cast("Mapping[Any, Any]", held).values()
    return [value for value in values if isinstance(value, Tensor)]


def _mapped(change: Callable[[Tensor], Tensor], batch: Any, only: str | None = None) -> Any:  # noqa: ANN401
    """All tensors of a batch changed; or those on this kind of device."""

    def one(leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, Tensor) and only in (None, leaf.device.type):
            return change(leaf)
        return leaf

    return tree_map(one, batch)
