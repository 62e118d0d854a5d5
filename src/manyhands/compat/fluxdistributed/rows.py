"""Rows: what a key says of its samples, as a table of (x, label)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import IterableDataset, TensorDataset

from manyhands.compat.fluxdistributed.pictures import Pictures
from manyhands.core.errors import UsageError
from manyhands.data.imagenet import Solutions

_HINT = "give what train_solutions returns, or a map-style data set of (x, label)"


def table_of(
    key: Any,  # noqa: ANN401
    *,
    dataset: Any,  # noqa: ANN401
    transform: Callable[[Any], Any] | None,
    classes: Iterable[int] | None,
    split: str,
) -> Any:  # noqa: ANN401
    """A table for the key. Raises UsageError for what is none, and if no row is left."""
    wanted = None if classes is None else _ids(classes)
    if isinstance(key, Solutions):
        rows = key if wanted is None else _kept(key, wanted)
        return Pictures(tree_of(dataset), rows, split, transform=transform)
    if issubclass(type(key), IterableDataset) or not (
        hasattr(key, "__len__") and hasattr(key, "__getitem__")
    ):
        raise UsageError(f"a {type(key).__name__} is no table", hint=_HINT)
    if not len(key):
        raise UsageError("the table is empty", hint="at least one row is needed")
    table = key if wanted is None else _Chosen(key, _places(key, wanted))
    return table if transform is None else _Transformed(table, transform)


def tree_of(dataset: Any) -> Any:  # noqa: ANN401
    """The tree of a data set: by name in the registry, URL, pathlib.Path, or what it is itself."""
    if isinstance(dataset, str):
        from manyhands.data.blobs import BlobTree
        from manyhands.data.registry import dataset as find

        dataset = BlobTree.at(dataset) if "://" in dataset else find(dataset)
    tree = dataset if hasattr(dataset, "walk") or not hasattr(dataset, "conf") else dataset.open()
    if hasattr(tree, "read_bytes") and not hasattr(tree, "iterdir"):
        raise UsageError(
            f"{tree} is one file, not a tree",
            hint='its entry needs type = "BlobTree", with the folder that has ILSVRC in it',
        )
    return tree


def _ids(classes: Iterable[int]) -> frozenset[int]:
    ids = frozenset(classes)
    if not ids or min(ids) < 0:
        raise UsageError(f"classes={classes!r}", hint="ids from 0 on: range(200), or [3, 7]")
    return ids


def _kept(key: Solutions, wanted: frozenset[int]) -> Solutions:
    if odd := sorted(wanted - set(range(len(key.labels)))):
        raise UsageError(f"class {odd[0]} of {len(key.labels)}", hint="ids count from 0")
    rows = [row for row in key if row.label in wanted]
    if not rows:
        raise UsageError("the key has no row of these classes", hint="ids count from 0")
    return Solutions(key.labels, rows)


def _places(table: Any, wanted: frozenset[int]) -> list[int]:  # noqa: ANN401
    """The rows of these classes. Labels that are at hand are looked at, others are read."""
    given = getattr(table, "labels", getattr(table, "targets", None))
    if isinstance(table, TensorDataset):
        given = table.tensors[-1]
    ids = (table[place][1] for place in range(len(table))) if given is None else given
    places = [place for place, label in enumerate(ids) if _id_of(label) in wanted]
    if not places:
        raise UsageError("the table has no row of these classes", hint="ids count from 0")
    return places


def _id_of(label: Any) -> int:  # noqa: ANN401
    return int(label.argmax()) if getattr(label, "ndim", 0) == 1 else int(label)


class _Chosen:
    def __init__(self, table: Any, places: list[int]) -> None:  # noqa: ANN401
        self._table, self._places = table, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._table[self._places[index]]

    def where(self, index: int) -> str:
        """Of the row that it is."""
        from manyhands.data.table import place_of

        return place_of(self._table, self._places[index])


class _Transformed:
    def __init__(self, table: Any, transform: Callable[[Any], Any]) -> None:  # noqa: ANN401
        self._table, self._transform = table, transform

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, y = self._table[index]
        return self._transform(x), y

    def where(self, index: int) -> str:
        """Of the row that it is."""
        from manyhands.data.table import place_of

        return place_of(self._table, index)
