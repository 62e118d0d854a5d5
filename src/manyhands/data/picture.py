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

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
    + (".ppm", ".pgm", ".pbm", ".pnm")
)
_UPRIGHT = 1  # of EXIF's orientations
_ORIENTATION = 0x0112
_MAX_16 = (1 << 16) - 1
