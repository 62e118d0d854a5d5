"""State: all that a peer must have to go on from a round as if it had always been there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import torch
import xxhash
from torch.nn import Module

from manyhands.checkpoint.tree import Flat, flatten
from manyhands.core.errors import UsageError
from manyhands.wire.tensors import bytes_of

OWN = ("model", "buffers", "gradients")
"""What a state has beside the things that are registered: names that none of them may have."""


class Stateful(Protocol):
    """An optimizer, a scheduler, a scaler, an average of weights: whatever training changes."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors, numbers, texts, and lists, tuples and dicts of these."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:  # noqa: ANN401
        """Be as the one that gave this."""
        ...


class TrainingState:
    """Of one model and of everything beside it, by name. Used by the user's thread."""

    def __init__(self, model: Module, things: Mapping[str, Stateful], gradients: Stateful) -> None:
        self._model, self.things, self._gradients = model, dict(things), gradients

    def tree(self) -> dict[str, Any]:
        """Its tensors are those in use, not copies."""
        return {**self._trained(), "gradients": self._gradients.state_dict()}

    def _trained(self) -> dict[str, Any]:
        saved = self._model.state_dict()
        fleeting = {n: b for n, b in self._model.named_buffers() if n not in saved}
        return {
            "model": dict(saved),
            "buffers": fleeting,
            **{name: thing.state_dict() for name, thing in self.things.items()},
        }

    def flat(self, *, copy: bool = False) -> Flat:
        """Shape and tensors. `copy`: on the CPU, and as they are now."""
        flat = flatten(self.tree())
        if not copy:
            return flat
        return flat._replace(tensors=[t.detach().to("cpu", copy=True) for t in flat.tensors])

    def load(self, tree: Mapping[str, Any]) -> None:
        """Be as `tree` says. Raises UsageError if it is one of another model or other things."""
        known = {"model", "buffers", *self.things}
        if set(tree) - {"gradients"} != known:
            raise UsageError(
                f"a state of {', '.join(sorted(tree))} came; "
                f"this peer has {', '.join(sorted(known))}",
                hint="wrap and register the same things at every peer",
            )
        try:
            self._model.load_state_dict(tree["model"])
        except RuntimeError as error:  # torch's word for keys or shapes that do not fit
            raise UsageError(f"the state is one of another model: {error}") from None
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, value in tree["buffers"].items():
                buffers[name].copy_(value)
        for name, thing in self.things.items():
            thing.load_state_dict(tree[name])
        self._gradients.load_state_dict(tree.get("gradients", {}))  # older checkpoints have none

    def digest(self) -> bytes:
        """Equal where every bit of the state is; gradients are on their way to be some of it."""
        return digest_of(flatten(self._trained()))


def digest_of(flat: Flat) -> bytes:
    """Of shape and tensors, on whatever device they are."""
    digest = xxhash.xxh3_128(msgspec.json.encode(flat.shape))
    for tensor in flat.tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.digest()
