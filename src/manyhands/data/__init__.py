"""Data: where it lies (the registry), which samples come when, and how they are read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.data.blobs import Blob, BlobTree
    from manyhands.data.chance import generator
    from manyhands.data.imagenet import ImageNetTable
    from manyhands.data.images import ImageTree
    from manyhands.data.jsonl import JsonlTable
    from manyhands.data.loader import Loader
    from manyhands.data.mixture import Mixture
    from manyhands.data.registry import DataSet, dataset
    from manyhands.data.rows import CsvTable
    from manyhands.data.table import BadSample
    from manyhands.data.writing import register

__all__ = [
    "BadSample",
    "Blob",
    "BlobTree",
    "CsvTable",
    "DataSet",
    "ImageNetTable",
    "ImageTree",
    "JsonlTable",
    "Loader",
    "Mixture",
    "dataset",
    "generator",
    "register",
]

# Loaded at first use: the registry needs no torch, and the rest of the room does.
_LAZY = {
    "BadSample": "manyhands.data.table",
    "Blob": "manyhands.data.blobs",
    "BlobTree": "manyhands.data.blobs",
    "CsvTable": "manyhands.data.rows",
    "DataSet": "manyhands.data.registry",
    "ImageNetTable": "manyhands.data.imagenet",
    "ImageTree": "manyhands.data.images",
    "JsonlTable": "manyhands.data.jsonl",
    "Loader": "manyhands.data.loader",
    "Mixture": "manyhands.data.mixture",
    "dataset": "manyhands.data.registry",
    "generator": "manyhands.data.chance",
    "register": "manyhands.data.writing",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'manyhands.data' has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
