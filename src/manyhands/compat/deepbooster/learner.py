"""Learner: the user's model, criterion and optimizer, and the tensors that travel for them.

What travels lies in CPU memory: the gradients of all trained parameters, then the model's buffers
of floating point (BatchNorm's statistics), which are averaged like gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from manyhands.compat.deepbooster.errors import DeviceMissing
from manyhands.compat.deepbooster.schedule import pack
from manyhands.core.errors import UsageError
from manyhands.wire.tensors import bytes_of

Criterion = Callable[[Any, Any], Tensor]


class Learner:
    """One replica. `tensors` are lent to a round from `compute` until it is committed."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS calls its closure several times a step, and a round has one gradient",
                hint="take an optimizer that steps without a closure, Adam or SGD say",
            )
        self._device = check_device(device)
        self._model = model.to(self._device)
        if isinstance(criterion, nn.Module):
            criterion.to(self._device)
        self._criterion, self._optimizer = criterion, optimizer
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # which brings it to the device
        groups: list[dict[str, Any]] = optimizer.param_groups
        every = [*model.parameters(), *(p for group in groups for p in group["params"])]
        self._parameters = [p for p in dict.fromkeys(every) if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        if not self._parameters:
            raise UsageError("the model has no parameter to train", hint="requires_grad_()")
        self.tensors = [
            torch.empty(value.shape, dtype=value.dtype)
            for value in (*self._parameters, *self._buffers)
        ]

    def settings(self, n_epoch: int) -> bytes:
        """A digest of what must be the same at all trainers, but for the trained weights."""
        digest = xxhash.xxh3_128()
        state = {"epochs": n_epoch, "optimizer": self._optimizer.state_dict()}
        kind = type(self._optimizer).__qualname__
        digest.update((kind + json.dumps(state, default=_kind_of)).encode())
        for name, value in self._model.named_parameters():
            words = f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}"
            digest.update(words.encode())
            if not value.requires_grad:
                digest.update(bytes_of(value.detach().cpu().contiguous()))
        return digest.digest()

    def compute(self, sample: Any, label: Any) -> bytes:  # noqa: ANN401
        """`tensors` := the gradients of one line; returns which of them there are, as bits."""
        for parameter in self._parameters:
            parameter.grad = None
        output = self._model(self._here(sample))
        self._criterion(output, self._here(label)).backward()  # pyright: ignore[reportUnknownMemberType]
        used = 0
        with torch.no_grad():
            for index, (tensor, value) in enumerate(
                zip(self.tensors, self._parameters, strict=False)
            ):
                if value.grad is None:
                    tensor.zero_()
                else:
                    tensor.copy_(value.grad.to_dense() if value.grad.is_sparse else value.grad)
                    used |= 1 << index
            self._copy_buffers()
        return pack(used)

    @torch.no_grad()
    def step(self, used: bytes) -> None:
        """Apply `tensors`, the mean over all trainers. A gradient that nobody has is None."""
        bits = int.from_bytes(used, "little")
        for index, (tensor, value) in enumerate(zip(self.tensors, self._parameters, strict=False)):
            value.grad = tensor.to(value.device, copy=True) if bits >> index & 1 else None
        for tensor, buffer in zip(self._shown_buffers, self._buffers, strict=True):
            buffer.copy_(tensor)
        self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    @property
    def num_states(self) -> int:
        """The weights, and each kind of value that the optimizer remembers of every weight."""
        return 1 + len(self._kinds())

    @torch.no_grad()
    def show_state(self, number: int) -> None:
        """`tensors` := that state: 0 are the weights themselves, with the buffers."""
        for tensor, value in zip(self.tensors, self._state(number), strict=False):
            tensor.zero_() if value is None else tensor.copy_(value)
        self._copy_buffers()

    @torch.no_grad()
    def take_state(self, number: int) -> None:
        """That state := `tensors`."""
        for tensor, value in zip(self.tensors, (*self._state(number), *self._buffers), strict=True):
            if value is not None:
                value.copy_(tensor)

    def _kinds(self) -> list[str]:
        """Momentum, say: a number for each weight. Others are the same where settings are."""
        remembered: Mapping[Tensor, Mapping[str, Any]] = self._optimizer.state
        found = ((p, remembered.get(p, {}).items()) for p in self._parameters)
        return sorted({name for p, known in found for name, value in known if _is_like(value, p)})

    def _state(self, number: int) -> list[Tensor | None]:
        """By parameter; None where there is no such value."""
        if number == 0:
            return [*self._parameters]
        kind = self._kinds()[number - 1]
        remembered: Mapping[Tensor, Mapping[str, Any]] = self._optimizer.state
        values = ((p, remembered.get(p, {}).get(kind)) for p in self._parameters)
        return [value if _is_like(value, p) else None for p, value in values]

    @property
    def _shown_buffers(self) -> list[Tensor]:
        return self.tensors[len(self._parameters) :]

    def _copy_buffers(self) -> None:
        for tensor, buffer in zip(self._shown_buffers, self._buffers, strict=True):
            tensor.copy_(buffer)

    def _here(self, value: Any) -> Any:  # noqa: ANN401
        return value.to(self._device) if isinstance(value, Tensor) else value


def check_device(device: torch.device | str) -> torch.device:
    """The device, if this machine has it. Raises DeviceMissing."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by how it was built
        said = str(error).splitlines()[0]
        raise DeviceMissing(
            f"device={str(device)!r} is not on this machine: {said}",
            hint="give device='cpu', or in a notebook choose a runtime with a GPU",
        ) from None
    return found


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _kind_of(value: object) -> str:
    """A tensor or an object of an optimizer, as far as it is the same on all machines."""
    if isinstance(value, Tensor):
        # A single value (a rate, a count of steps) is the same, too; in more, rounding differs.
        known = value.item() if value.numel() == 1 else tuple(value.shape)
        return f"{value.dtype} {known}"
    return type(value).__qualname__
