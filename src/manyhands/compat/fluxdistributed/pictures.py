"""Pictures: ImageNet's rows as samples, a batch of some of them, and what else a key may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from manyhands.compat.fluxdistributed.feed import Bad
from manyhands.core.errors import UsageError
from manyhands.data.fetch import Marks
from manyhands.data.files import as_tree, place_in
from manyhands.data.imagenet import Solutions, class_ids, path_of
from manyhands.data.picture import read_picture
from manyhands.data.quarantine import Rules
from manyhands.data.reader import Reader, guarded
from manyhands.data.source import Source
from manyhands.data.table import Composed, named, place_of

Transform = Callable[[Tensor], Any]

SHORT_SIDE, SIDE = 256, 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_HINT = "give what train_solutions returns, or a map-style data set of (x, label)"


def preprocess(image: Tensor) -> Tensor:
    """A picture (uint8, 3 x height x width) as ImageNet's models take it: float32, 3 x 224 x 224.

    The short side becomes 256, the middle is cut out, and colours are normalised, once.
    """
    height, width = image.shape[-2:]
    scale = SHORT_SIDE / min(height, width)
    size = [max(SHORT_SIDE, round(height * scale)), max(SHORT_SIDE, round(width * scale))]
    made = F.interpolate(
        image[None].float() / 255, size=size, mode="bilinear", antialias=True, align_corners=False
    )[0]
    top, left = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    made = made[:, top : top + SIDE, left : left + SIDE]
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    return (made - mean) / deviation


class Pictures:
    """The rows of `train_solutions` as samples, (picture, class id); pictures by `transform`."""

    def __init__(
        self,
        tree: Any,  # noqa: ANN401
        key: Solutions,
        split: str = "train",
        *,
        transform: Transform | None = None,
    ) -> None:
        self._tree, self._key, self._split = as_tree(tree), key, split
        self._transform = transform or preprocess

    def __len__(self) -> int:
        return len(self._key)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        where = self.where(index)
        row = self._key[index]
        image = read_picture(self._tree, path_of(row, self._split), where)
        with named(where):
            return self._transform(image), row.label

    def where(self, index: int) -> str:
        """The file of a picture."""
        return place_in(self._tree, path_of(self._key[index], self._split))


def minibatch(
    tree: Any,  # noqa: ANN401
    key: Solutions,
    nsamples: int = 16,
    replacement: bool = False,
    *,
    split: str = "train",
    transform: Transform | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Some rows of the key at random, as a batch: pictures, and class ids.

    No row is there twice, unless with `replacement`. `tree` is a path or a tree of blobs. Raises
    UsageError, and BadSample for a picture that cannot be read.
    """
    if nsamples < 1 or not len(key):
        raise UsageError(f"{nsamples} of {len(key)} rows", hint="at least one")
    if replacement:
        chosen = torch.randint(len(key), (nsamples,), generator=generator)
    elif nsamples > len(key):
        raise UsageError(
            f"{nsamples} of {len(key)} rows, each of them once",
            hint="take fewer, or replacement=True",
        )
    else:
        chosen = torch.randperm(len(key), generator=generator)[:nsamples]
    table = Pictures(tree, key, split, transform=transform)
    samples = [table[int(index)] for index in chosen]
    pictures = torch.stack([picture for picture, _ in samples])
    return pictures, torch.tensor([label for _, label in samples])


def table_of(
    key: Any,  # noqa: ANN401
    *,
    dataset: Any,  # noqa: ANN401
    transform: Callable[[Any], Any] | None,
    classes: Iterable[int] | None,
    split: str,
    bad: Bad = "raise",
) -> Any:  # noqa: ANN401
    """A table for the key. Raises UsageError for what is none, and if no row is left. Rows whose
    class only reading them could tell, and that are `bad`, are kept, or raise BadSample.
    """
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
    table = key if wanted is None else _Chosen(key, _places(key, wanted, bad))
    return table if transform is None else _Transformed(table, transform, bad)


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
    ids = frozenset(class_ids(classes))
    if min(ids) < 0:
        raise UsageError(f"classes={classes!r}", hint="ids from 0 on: range(200), or [3, 7]")
    return ids


def _kept(key: Solutions, wanted: frozenset[int]) -> Solutions:
    if odd := sorted(wanted - set(range(len(key.labels)))):
        raise UsageError(f"class {odd[0]} of {len(key.labels)}", hint="ids count from 0")
    rows = [row for row in key if row.label in wanted]
    if not rows:
        raise UsageError("the key has no row of these classes", hint="ids count from 0")
    return Solutions(key.labels, rows)


def _places(table: Any, wanted: frozenset[int], bad: Bad) -> list[int]:  # noqa: ANN401
    """The rows of these classes, and those of which nobody can tell: what becomes of a bad sample
    is decided, and counted, where it is trained on.
    """
    ids = enumerate(_ids_of(table, bad))
    places = [place for place, known in ids if known is None or known in wanted]
    if not places:
        raise UsageError("the table has no row of these classes", hint="ids count from 0")
    return places


def _ids_of(table: Any, bad: Bad) -> Iterator[int | None]:  # noqa: ANN401
    """The class of each row; None: it cannot be read. Labels at hand are looked at, no more."""
    if (labels := _labels_of(table)) is not None:
        yield from map(_id_of, labels)
        return
    rules = Rules(policy="raise" if bad == "raise" else "skip")
    source = Source(dataset=table, batch=1, collate=list, rules=rules)
    reader = Reader(source, seed=0, alone=False)
    for place in range(len(table)):
        own, number = table, place
        while isinstance(own, Composed):
            own, number = own.drawn_from(number)
        if own is not table and (labels := _labels_of(own)) is not None:
            yield _id_of(labels[number])
            continue
        read = reader.read(Marks(0, (place,), [place]))
        yield _id_of(read.batch[0][1]) if read.num else None


def _labels_of(table: Any) -> Any:  # noqa: ANN401
    """Those that it has at hand, by row; or None."""
    if isinstance(table, TensorDataset):
        return table.tensors[-1]
    labels = getattr(table, "labels", None)
    return getattr(table, "targets", None) if labels is None else labels


def _id_of(label: Any) -> int:  # noqa: ANN401
    return int(label.argmax()) if getattr(label, "ndim", 0) == 1 else int(label)


class _Chosen:
    def __init__(self, table: Any, places: list[int]) -> None:  # noqa: ANN401
        self._table, self._places = table, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._table[self._places[index]]

    def drawn_from(self, index: int) -> tuple[Any, int]:
        """The table that knows what is bad, and the row there."""
        return self._table, self._places[index]

    def where(self, index: int) -> str:
        """Of the row that it is."""
        return place_of(self._table, self._places[index])


class _Transformed:
    def __init__(self, table: Any, transform: Callable[[Any], Any], bad: Bad) -> None:  # noqa: ANN401
        self._table, self._transform = table, transform
        self._guarded = bad != "raise"

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        # By its `where` this table is trusted, so that errors of `transform` stay what they are:
        # what a foreign table raises is made a BadSample here, where the two can be told apart.
        x, y = guarded(self._table, index) if self._guarded else self._table[index]
        return self._transform(x), y

    def where(self, index: int) -> str:
        """Of the row that it is."""
        return place_of(self._table, index)
