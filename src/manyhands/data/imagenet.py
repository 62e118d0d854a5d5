"""ImageNet: the layout of the Kaggle archive (ILSVRC CLS-LOC): its labels, solutions and paths.

    LOC_synset_mapping.txt                            a line a class: its synset, its description
    LOC_train_solution.csv, LOC_val_solution.csv      an image, and the synset of each of its boxes
    ILSVRC/Data/CLS-LOC/train/SYNSET/IMAGE.JPEG
    ILSVRC/Data/CLS-LOC/{val,test}/IMAGE.JPEG

The id of a class is its place in the mapping, counted from 0.
"""

from __future__ import annotations

import csv
import io
import operator
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from manyhands.core.errors import UsageError
from manyhands.data.files import Tree, as_tree, place_in
from manyhands.data.names import Names
from manyhands.data.table import named

if TYPE_CHECKING:
    from torch import Tensor

ROOT = "ILSVRC/Data/CLS-LOC"
MAPPING = "LOC_synset_mapping.txt"
SPLITS = ("train", "val", "test")
_SOLUTIONS = {"train": "LOC_train_solution.csv", "val": "LOC_val_solution.csv"}
_SUBMISSION = "LOC_sample_submission.csv"  # the images of the test split
_HEADER = ["ImageId", "PredictionString"]
_PER_BOX = 5  # words: synset, left, top, right, bottom
_SHOWN = 5  # rows that a message names


class Label(NamedTuple):
    """A class."""

    id: int
    synset: str
    description: str


class Solution(NamedTuple):
    """An image and its class. `agrees`: all its boxes are of that class."""

    image: str
    synset: str
    label: int
    agrees: bool = True


class Solutions(Sequence[Solution]):
    """Images with their classes, in the order of the file.

    Rows whose boxes are of several classes are kept: `disagreeing` has their numbers. In train such
    an image has the class whose folder it is in, else that of its first box.
    """

    def __init__(self, labels: Sequence[Label], rows: Iterable[Solution]) -> None:
        self.labels = tuple(labels)
        self._classes, self.disagreeing = array("i"), array("Q")
        self._images = Names(self._taken(rows))
        self._disagree = frozenset(self.disagreeing)

    def _taken(self, rows: Iterable[Solution]) -> Iterator[str]:
        for number, row in enumerate(rows):
            self._classes.append(row.label)
            if not row.agrees:
                self.disagreeing.append(number)
            yield row.image

    @property
    def ids(self) -> Sequence[int]:
        """The class of each image, by number."""
        return self._classes

    def __len__(self) -> int:
        return len(self._classes)

    @overload
    def __getitem__(self, index: int, /) -> Solution: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Solution]: ...
    def __getitem__(self, index: int | slice, /) -> Solution | list[Solution]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        label = self._classes[place]
        agrees = place not in self._disagree
        return Solution(self._images[place], self.labels[label].synset, label, agrees)

    def __iter__(self) -> Iterator[Solution]:
        return (self[i] for i in range(len(self)))


def labels(tree: Any, file: str = MAPPING) -> list[Label]:  # noqa: ANN401
    """The classes by id. `tree` is a path or a tree of blobs. Raises UsageError."""
    text, where = _text(as_tree(tree), file)
    found: list[Label] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        synset, _, description = line.strip().partition(" ")
        if not synset:
            continue
        if synset in lines:
            raise UsageError(
                f"{where}:{number}: {synset} is there already, in line {lines[synset]}",
                hint="the place of a synset is its id: remove one of the two",
            )
        lines[synset] = number
        found.append(Label(len(found), synset, description.strip()))
    if not found:
        raise UsageError(f"{where} names no class", hint="a line a class: SYNSET DESCRIPTION")
    return found


def train_solutions(
    tree: Any,  # noqa: ANN401
    file: str = _SOLUTIONS["train"],
    classes: Iterable[int] | None = None,
    *,
    mapping: str = MAPPING,
) -> Solutions:
    """The images of the train split, those of `classes` (ids; None: all). Raises UsageError.

    Warns once if the boxes of some images disagree; see Solutions.
    """
    return _solutions(as_tree(tree), file, classes, mapping, by_folder=True)


def val_solutions(
    tree: Any,  # noqa: ANN401
    file: str = _SOLUTIONS["val"],
    classes: Iterable[int] | None = None,
    *,
    mapping: str = MAPPING,
) -> Solutions:
    """The same for the val split."""
    return _solutions(as_tree(tree), file, classes, mapping, by_folder=False)


def submission_images(tree: Any, file: str = _SUBMISSION) -> Names:  # noqa: ANN401
    """The images of the test split, which has no solutions. Raises UsageError."""
    tree = as_tree(tree)
    return Names(row[0] for _, row in _rows(tree, file))


def makepaths(
    rows: Iterable[Solution | str], split: str = "train", *, root: str = ROOT
) -> list[str]:
    """Where images are in the tree. For val and test an image's name is enough.

    So it is for train, where a name begins with the synset: n01440764_10026.
    """
    return [path_of(row, split, root=root) for row in rows]


def path_of(row: Solution | str, split: str = "train", *, root: str = ROOT) -> str:
    """Where one image is in the tree."""
    _check_split(split)
    image = row if isinstance(row, str) else row.image
    if split != "train":
        return f"{root}/{split}/{image}.JPEG"
    synset = image.partition("_")[0] if isinstance(row, str) else row.synset
    return f"{root}/train/{synset}/{image}.JPEG"


class ImageNetTable:
    """Images of a split with the ids of their classes: (tensor, id), or the tensor alone for test.

    The tensor is as `picture.decode` has it (uint8, 3 x height x width), or what `transform` makes
    of that. `classes` are the ids to keep; they stay what they are.
    """

    def __init__(
        self,
        tree: Any,  # noqa: ANN401
        split: str = "train",
        *,
        classes: Iterable[int] | None = None,
        transform: Callable[[Tensor], Any] | None = None,
        root: str = ROOT,
    ) -> None:
        _check_split(split)
        self.split, self._tree = split, as_tree(tree)
        self.transform, self._root = transform, root
        if split == "test":
            if classes is not None:
                raise UsageError("nobody says of which classes the test images are")
            self.solutions = None
            self._rows: Sequence[Solution] | Sequence[str] = submission_images(self._tree)
        else:
            read = train_solutions if split == "train" else val_solutions
            self._rows = self.solutions = read(self._tree, classes=classes)

    @property
    def labels(self) -> Sequence[int] | None:
        """The id of each image's class, for which no image is read; None for test."""
        return None if self.solutions is None else self.solutions.ids

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        from manyhands.data.picture import read_picture

        row = self._rows[index]
        where = self.where(index)
        image: Any = read_picture(self._tree, path_of(row, self.split, root=self._root), where)
        if self.transform is not None:
            with named(where):
                image = self.transform(image)
        return image if isinstance(row, str) else (image, row.label)

    def where(self, index: int) -> str:
        """The file of an image."""
        return place_in(self._tree, path_of(self._rows[index], self.split, root=self._root))


def _solutions(
    tree: Tree, file: str, classes: Iterable[int] | None, mapping: str, *, by_folder: bool
) -> Solutions:
    known = labels(tree, mapping)
    wanted = _wanted(classes, len(known))
    ids = {label.synset: label.id for label in known}
    where = place_in(tree, file)

    def taken() -> Iterator[Solution]:
        for line, (image, prediction) in _rows(tree, file):
            synsets = _synsets(prediction, f"{where}:{line}")
            folder = image.partition("_")[0]
            synset = folder if by_folder and folder in synsets else synsets[0]
            for unknown in (s for s in synsets if s not in ids):
                raise UsageError(
                    f"{where}:{line}: {unknown} is not in {mapping}",
                    hint="the two files must be of one archive",
                )
            if ids[synset] in wanted:
                yield Solution(image, synset, ids[synset], len(set(synsets)) == 1)

    found = Solutions(known, taken())
    if not len(found):
        raise UsageError(f"{where} has no image of these classes", hint="ids are counted from 0")
    if found.disagreeing:
        shown = ", ".join(found[i].image for i in found.disagreeing[:_SHOWN])
        more = len(found.disagreeing) - _SHOWN
        warnings.warn(
            f"{where}: the boxes of {len(found.disagreeing)} images are of several classes, and "
            f"each was given one of them: {shown}" + (f" and {more} more" if more > 0 else ""),
            stacklevel=4,
        )
    return found


def class_ids(classes: Iterable[int], most: str = "on") -> tuple[int, ...]:
    """What a user gave for some classes, as ids. Raises UsageError for what are none; `most` is
    where they end, in its hint.
    """
    try:
        ids = tuple(map(operator.index, classes))
    except TypeError:  # no list at all, or one of other things
        ids = ()
    if not ids:
        raise UsageError(
            f"classes={repr(classes)[:80]}", hint=f"ids from 0 {most}: range(200), or [3, 7]"
        )
    return ids


def _wanted(classes: Iterable[int] | None, number: int) -> frozenset[int]:
    if classes is None:
        return frozenset(range(number))
    most = f"to {number - 1}"
    wanted = frozenset(class_ids(classes, most))
    if wrong := sorted(c for c in wanted if not 0 <= c < number):
        raise UsageError(f"classes {wrong[:_SHOWN]} of {number}", hint=f"ids from 0 {most}")
    return wanted


def _synsets(prediction: str, where: str) -> list[str]:
    words = prediction.split()
    if not words or len(words) % _PER_BOX:
        raise UsageError(
            f"{where}: {prediction!r} is no list of boxes",
            hint="a box is a synset and four numbers",
        )
    return words[::_PER_BOX]


def _rows(tree: Tree, file: str) -> Iterator[tuple[int, list[str]]]:
    """Rows of two columns, with the lines they are in."""
    text, where = _text(tree, file)
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, None)
    if header != _HEADER:
        raise UsageError(
            f"{where}:1: the columns are {header or []}, expected {_HEADER}",
            hint="give the file of the Kaggle archive, unchanged",
        )
    for row in reader:
        if len(row) != len(_HEADER):
            if not row:
                continue
            raise UsageError(f"{where}:{reader.line_num}: {len(row)} columns, expected 2")
        yield reader.line_num, row


def _text(tree: Tree, file: str) -> tuple[str, str]:
    where = place_in(tree, file)
    try:
        data: bytes = tree[file].read_bytes()
    except (KeyError, FileNotFoundError):
        raise UsageError(
            f"{where} is not there", hint="give the folder into which the archive was unpacked"
        ) from None
    try:
        return data.decode("utf-8-sig"), where
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8: {error}") from None


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise UsageError(f"split={split!r}", hint=f"one of {', '.join(SPLITS)}")
