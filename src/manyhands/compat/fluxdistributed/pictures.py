"""Pictures: ImageNet's rows as samples, and a batch of some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyhands.core.errors import UsageError
from manyhands.data.files import as_tree, place_in
from manyhands.data.imagenet import Solutions, path_of
from manyhands.data.picture import read_picture
from manyhands.data.table import named

Transform = Callable[[Tensor], Any]

SHORT_SIDE, SIDE = 256, 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
