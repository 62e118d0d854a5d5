"""Picture: the bytes of an image file as a tensor. Needs Pillow (the extra `images`).

Whatever the file has, the tensor has 8 bits a value and three colours: uint8, 3 x height x width.

    grey (with or without alpha), 1 bit   the same value for all three
    palette                               its colours
    CMYK, YCbCr, LAB, HSV                 converted as Pillow does, without colour profiles
    alpha                                 left out, not laid over a background
    16 bits, grey                         the nearest of 256 values (65535 becomes 255)
    16 bits, colours                      their upper 8 bits, as Pillow reads them
    32 bits, whole numbers to 65535       as 16 bits; others and fractions have no known range: bad
    EXIF orientation                      turned upright; an EXIF block that is broken turns nothing
    several frames                        the first
"""

from __future__ import annotations

import io
import struct
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.data.files import Tree, read_in
from manyhands.data.memory import is_out_of_memory
from manyhands.data.spec import parts_of
from manyhands.data.table import BadSample

_MOST_BYTES = 1 << 30  # of a file: a tree may have anything in it
_ORIENTATION = 0x0112
_MAX_16 = (1 << 16) - 1
# What Pillow raises for one, over the years; its text gives no reason to leave the picture out.
_BROKEN_EXIF = (
    struct.error,
    *(SyntaxError, LookupError, TypeError, ValueError, OSError, EOFError, ArithmeticError),
)


class NoPicture(ValueError):
    """Bytes that are no image, or not a whole one."""


def decode(data: bytes) -> Tensor:
    """What the top of this module says. Raises NoPicture.

    How large an image may be, and whether a part of one will do, is Pillow's to say.
    """
    image_module = _pillow()
    if not data:
        raise NoPicture("it is empty")
    try:
        with image_module.open(io.BytesIO(data)) as image:
            image.load()
            return _tensor(_upright(image, image_module))
    except image_module.UnidentifiedImageError as error:  # its text has an address in memory
        raise NoPicture("it is no image of a format that Pillow knows") from error
    except Exception as error:  # each of its formats has errors of its own
        if is_out_of_memory(error):
            raise
        raise NoPicture(str(error) or type(error).__name__) from error


def read_picture(tree: Tree, name: str, where: str) -> Tensor:
    """An image of a tree. Raises BadSample; what the network or the disk raises, as it is."""
    try:
        parts_of(name)  # lists of images are written by others, and may name anything
    except UsageError as error:
        raise BadSample(where, error.message) from None
    try:
        data = read_in(tree, name, _MOST_BYTES + 1)
    except (KeyError, FileNotFoundError, NotADirectoryError):
        raise BadSample(where, "it is not there, or is no plain file") from None
    if len(data) > _MOST_BYTES:
        raise BadSample(where, f"it has more than {_MOST_BYTES} bytes")
    try:
        return decode(data)
    except NoPicture as error:
        raise BadSample(where, str(error)) from error


def _upright(image: Any, image_module: Any) -> Any:  # noqa: ANN401
    turn = image_module.Transpose
    turns = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_270,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_90,
    }
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except _BROKEN_EXIF:
        return image
    return image.transpose(turns[orientation]) if orientation in turns else image


def _tensor(image: Any) -> Tensor:  # noqa: ANN401
    width, height = image.size
    if image.mode == "F":
        raise ValueError("its values are fractions, and their range is not known")
    if image.mode.startswith("I"):
        words = torch.frombuffer(bytearray(image.convert("I").tobytes()), dtype=torch.int32)
        if int(words.min()) < 0 or int(words.max()) > _MAX_16:
            raise ValueError("its values do not fit 16 bits, and their range is not known")
        grey = ((words.to(torch.int64) * 255 + _MAX_16 // 2) // _MAX_16).to(torch.uint8)
        return grey.view(1, height, width).repeat(3, 1, 1)
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")  # what of it is transparent may be said in several ways
    values = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return values.view(height, width, 3).permute(2, 0, 1).contiguous()


def _pillow() -> Any:  # noqa: ANN401
    try:
        from PIL import Image  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError(
            "images are read with Pillow, which is not installed",
            hint="pip install 'manyhands[images]', or pip install pillow",
        ) from None
    return Image
