"""DeepPool's way of working: a cluster in one terminal, training jobs from another.

    python -m manyhands.compat.deeppool.cluster --addrToBind 127.0.0.1:12347 --hostfile hostfile.txt
    python examples/resnetImported.py 4 128

docs/deeppool.md says what replaces its container, its build and its runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.compat.deeppool import models as models
    from manyhands.compat.deeppool.client import ClusterClient, submitTrainingJob
    from manyhands.compat.deeppool.program import Lesson, main, parser_of
    from manyhands.compat.deeppool.tables import Tables, pictures, text
    from manyhands.compat.deeppool.training import load_weights

__all__ = [
    "ClusterClient",
    "Lesson",
    "Tables",
    "load_weights",
    "main",
    "models",
    "parser_of",
    "pictures",
    "submitTrainingJob",
    "text",
]

# Loaded at first use: the cluster and the client need no torch.
_LAZY = {
    "ClusterClient": ".client",
    "Lesson": ".program",
    "Tables": ".tables",
    "load_weights": ".training",
    "main": ".program",
    "parser_of": ".program",
    "pictures": ".tables",
    "submitTrainingJob": ".client",
    "text": ".tables",
}


def __getattr__(name: str) -> object:
    if name == "models":
        return import_module(".models", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
