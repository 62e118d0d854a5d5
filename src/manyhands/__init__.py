"""Train one PyTorch model with every machine you can reach."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from manyhands._version import __version__

if TYPE_CHECKING:
    from manyhands.links.base import open_link

__all__ = ["__version__", "open_link"]

# Loaded at first use, so that `import manyhands` is fast and loads no torch.
_LAZY = {"open_link": "manyhands.links.base"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
