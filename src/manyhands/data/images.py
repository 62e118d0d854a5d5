"""Images: a folder of folders of images, each folder a class. Needs Pillow (the extra `images`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import UsageError
from manyhands.data.files import as_tree, place_in
from manyhands.data.names import Names
from manyhands.data.table import named

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = frozenset(
    [
        *(".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm"),
    ]
)
_SHOWN = 5  # names that a message lists


class ImageTree:
    """The images below a tree, `(tensor, id)` by number: class by class, in the order of names.

    The class of an image is the folder of the tree that it is in, at any depth; `classes` are
    their names, sorted, and the id of a class is its place there. Given as an argument, `classes`
    says which there are and which ids they have, so that a tree for evaluation can have those of
    the tree for training. Files of other kinds, and hidden ones, are `left_out`, which counts them.

    The tensor is as `picture.decode` has it (uint8, 3 x height x width), or what `transform` makes
    of that. `tree` is a path or a tree of blobs; it is listed once, here.
    """

    def __init__(
        self,
        tree: Any,  # noqa: ANN401
        *,
        transform: Callable[[Tensor], Any] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._tree, self.transform = as_tree(tree), transform
        every = [file.name for file in self._tree.walk()]
        images = sorted((_class_of(name), name) for name in every if _is_image(name))
        self.left_out = len(every) - len(images)
        self.classes = self._known(dict.fromkeys(folder for folder, _ in images), classes)
        ids = {name: number for number, name in enumerate(self.classes)}
        taken = [(folder, name) for folder, name in images if folder in ids]
        self._names = Names(name for _, name in taken)
        self.labels = array("i", (ids[folder] for folder, _ in taken))
        """The id of each image's class."""

    def _known(self, found: Iterable[str], wanted: Sequence[str] | None) -> tuple[str, ...]:
        known = tuple(found)
        if "" in known and wanted is None:
            raise UsageError(
                f"{self._tree} has images that are in no folder, so of no class",
                hint="put them into a folder, or name the folders that count: classes=[...]",
            )
        if wanted is None:
            wanted = known
        missing = [name for name in wanted if name not in known]
        if not wanted or missing:
            said = f"no images in {', '.join(missing[:_SHOWN])}" if missing else "no images"
            raise UsageError(
                f"{self._tree} has {said}",
                hint="a class is a folder with images in it; the kinds are "
                + " ".join(sorted(SUFFIXES)),
            )
        if len(set(wanted)) < len(wanted):
            raise UsageError("a class is there twice in classes=", hint="its place there is its id")
        return tuple(wanted)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from manyhands.data.picture import read_picture

        where = self.where(index)
        image: Any = read_picture(self._tree, self._names[index], where)
        if self.transform is not None:
            with named(where):
                image = self.transform(image)
        return image, self.labels[index]

    def where(self, index: int) -> str:
        """The file of an image."""
        return place_in(self._tree, self._names[index])


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden


def _class_of(name: str) -> str:
    folder, slash, _ = name.partition("/")
    return folder if slash else ""
