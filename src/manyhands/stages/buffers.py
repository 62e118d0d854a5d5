"""Buffers: what layers write to while they compute, running statistics above all."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn


class _Noted(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor


class Statistics:
    """The buffers of some modules that a checkpoint would hold, as they were when noted."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = {
            id(buffer): (module, name)
            for root in modules
            for module in root.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        }
        self._places = list(found.values())  # a layer may put another tensor there
        self._noted: list[_Noted] = []

    @torch.no_grad()
    def note(self) -> None:
        """Keep their values."""
        if not self._places:
            return
        with torch.inference_mode(False):  # what is kept is written to in later steps
            self._note()

    @torch.no_grad()
    def _note(self) -> None:
        now = [
            (module, name, buffer)
            for module, name in self._places
            if (buffer := cast("Tensor | None", getattr(module, name))) is not None
        ]
        if [(id(b), b.shape) for _, _, b in now] == [
            (id(kept.buffer), kept.copy.shape) for kept in self._noted
        ]:
            copies, buffers = [n.copy for n in self._noted], [n.buffer for n in self._noted]
            if buffers:
                torch._foreach_copy_(copies, buffers)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._noted = [_Noted(module, name, b, b.clone()) for module, name, b in now]

    @torch.no_grad()
    def put_back(self) -> None:
        """Their values are what was noted."""
        for module, name, buffer, copy in self._noted:
            buffer.copy_(copy)
            setattr(module, name, buffer)


@contextmanager
def preserved(modules: Iterable[nn.Module]) -> Generator[None]:
    """Buffers are copies inside, and afterwards what they were before."""
    kept = [
        (module, name, buffer)
        for root in modules
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        for module, name, buffer in kept:
            setattr(module, name, buffer.detach().clone())
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
