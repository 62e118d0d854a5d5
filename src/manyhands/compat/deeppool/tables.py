"""Tables: what the examples train on. Nothing is downloaded.

    digits      scikit-learn's 1,797 handwritten digits, as PNG files in a folder for each
    photos      pieces of scikit-learn's two photographs, as JPEG files: which of them is it from?
    FOLDER      your own pictures: a folder for each class (cats/, dogs/)
    python      what Python's own `help()` has to say, as bytes
    FILE        a text of your own

What is written, is written where processes of one machine share it; all at once, by whoever comes
first.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyhands.core.errors import DataError, UsageError
from manyhands.data.images import ImageTree

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours
VOCABULARY = 256  # bytes

_EVERY = 10  # one of so many is for the evaluation, where nobody says which
_PIECE, _STRIDE = 64, 32  # pixels: of a photograph's pieces, and from one to the next
_UNSEEN_DIGITS = 297
_UNSEEN = 0.75  # pieces to the right of this part of a photograph are for the evaluation

Pictures = Iterator[tuple[str, Any]]
"""(name of a file below a folder, Pillow's image)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Samples to learn from, and others to evaluate on; each is (input, class or classes)."""

    training: Any
    evaluation: Any
    num_classes: int


# -- pictures -----------------------------------------------------------------------------------


def pictures(data: str, evaluation: str | None, *, px: int, folder: Path | None = None) -> Tables:
    """Those of `data` (see above), px x px each. `folder`: where digits and photos are written.

    Of a folder of yours without one to evaluate on, every tenth picture is kept for that. Raises
    UsageError for a folder that is none.
    """
    if px < 1:
        raise UsageError(f"pictures of {px} pixels a side", hint="32, say")
    transform = Fitted(px)
    if data in WRITTEN:
        if evaluation is not None:
            raise UsageError(
                f"{data} brings what it is evaluated on", hint=f"leave {evaluation} out"
            )
        made = written(folder or _shared(), data)
        data, evaluation = str(made / "train"), str(made / "test")
    for place in (data, evaluation):
        if place is not None and not os.path.isdir(place):
            raise UsageError(
                f"there is no folder {place}",
                hint=f"a folder that has one for each class, or {' or '.join(WRITTEN)}",
            )
    every = ImageTree(data, transform=transform)
    num_classes = len(every.classes)
    if evaluation is not None:
        unseen = ImageTree(evaluation, transform=transform, classes=every.classes)
        return Tables(training=every, evaluation=unseen, num_classes=num_classes)
    kept = [place for place in range(len(every)) if place % _EVERY == 0]
    rest = [place for place in range(len(every)) if place % _EVERY]
    if not rest:
        raise UsageError(f"{data} has {len(every)} picture", hint="it takes some of each class")
    return Tables(training=Some(every, rest), evaluation=Some(every, kept), num_classes=num_classes)


class Fitted:
    """A picture as models take it: its middle, px x px, normalised."""

    def __init__(self, px: int) -> None:
        self._px = px

    def __call__(self, image: Tensor) -> Tensor:
        """From uint8, 3 x height x width."""
        height, width = image.shape[-2:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        middle = image[None, :, top : top + side, left : left + side].float() / 255
        size = [self._px, self._px]
        made = F.interpolate(middle, size=size, mode="bilinear", antialias=side > self._px)[0]
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
        return (made - mean) / deviation


class Some:
    """Some samples of a table, by their numbers there."""

    def __init__(self, table: Any, chosen: Sequence[int]) -> None:  # noqa: ANN401
        self._table, self._chosen = table, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._table[self._chosen[index]]

    def where(self, index: int) -> str:
        """As the table says it."""
        return self._table.where(self._chosen[index])


def written(folder: Path, name: str) -> Path:
    """The folder with `train` and `test` of digits or photos, written if nobody has before.

    From any number of processes: it is there as a whole or not at all. Raises DataError.
    """
    place = folder / name
    if place.is_dir():
        return place
    draft = folder / f".{name}-{secrets.token_hex(8)}"
    try:
        for file, image in WRITTEN[name]():
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            image.save(draft / file)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():  # else somebody was faster, with the same pictures
                raise
    except OSError as error:
        raise DataError(f"pictures cannot be written to {folder}: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def digits() -> Pictures:
    """All of them; the last 297 are to evaluate on."""
    image_module, found = _pillow(), _sklearn("load_digits")
    for number, (values, digit) in enumerate(zip(found.images, found.target, strict=True)):
        grey = bytes(int(value) * 255 // 16 for value in values.ravel())
        part = "train" if number < len(found.images) - _UNSEEN_DIGITS else "test"
        image = image_module.frombytes("L", values.shape[::-1], grey)
        yield f"{part}/{digit}/{number:04}.png", image


def photos() -> Pictures:
    """Square pieces of a temple and of a flower; those to evaluate on overlap no others."""
    image_module, found = _pillow(), _sklearn("load_sample_images")
    for name, values in zip(found.filenames, found.images, strict=True):
        image = image_module.fromarray(values)
        width, height = image.size
        for top in range(0, height - _PIECE + 1, _STRIDE):
            for left in range(0, width - _PIECE + 1, _STRIDE):
                if left < _UNSEEN * width < left + _PIECE:
                    continue  # a part of it on either side
                part = "train" if left < _UNSEEN * width else "test"
                piece = image.crop((left, top, left + _PIECE, top + _PIECE))
                yield f"{part}/{Path(name).stem}/{top:03}-{left:03}.jpg", piece


WRITTEN: Mapping[str, Callable[[], Pictures]] = {"digits": digits, "photos": photos}


# -- text ---------------------------------------------------------------------------------------


def text(data: str, *, length: int) -> Tables:
    """A text in stretches of so many bytes; its last tenth is to evaluate on. Raises UsageError."""
    if length < 1:
        raise UsageError(f"stretches of {length} bytes", hint="64, say")
    if data == "python":
        from pydoc_data.topics import topics

        whole = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            whole = Path(data).read_bytes()
        except OSError as error:
            raise UsageError(
                f"{data} cannot be read: {error.strerror}", hint="a file of text, or python"
            ) from None
    known = len(whole) * (_EVERY - 1) // _EVERY
    parts = Stretches(whole[:known], length), Stretches(whole[known:], length)
    if not all(len(part) for part in parts):
        raise UsageError(
            f"{data} has {len(whole)} bytes", hint=f"at least {_EVERY * (length + 1)}, for {length}"
        )
    return Tables(training=parts[0], evaluation=parts[1], num_classes=VOCABULARY)


class Stretches:
    """Of a text: (bytes, the byte after each), as numbers."""

    def __init__(self, whole: bytes, length: int) -> None:
        self._whole, self._length = whole, length

    def __len__(self) -> int:
        return (len(self._whole) - 1) // self._length if self._whole else 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self._length
        values = torch.tensor(list(self._whole[first : first + self._length + 1]))
        return values[:-1], values[1:]


# -- what need not be installed -----------------------------------------------------------------


def _shared() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "manyhands" / "deeppool"


def _pillow() -> Any:  # noqa: ANN401
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("pictures need Pillow", hint="pip install 'manyhands[images]'") from None
    return Image


def _sklearn(name: str) -> Any:  # noqa: ANN401
    try:
        from sklearn import datasets  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise UsageError(
            "these pictures are scikit-learn's, which is not installed",
            hint="pip install 'manyhands[demo]', or --data FOLDER",
        ) from None
    return getattr(datasets, name)()
