"""Lines: JSONL files of samples, each line an object with `input` and `label`. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from manyhands.compat.deepbooster.errors import ChunkError

_SHOWN_LINES = 10  # of those that are broken
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 641  # digits: Python reads as many in any case, and more if it is told to


class Line(NamedTuple):
    """A line that is not blank: where it begins, its number as an editor shows it, its bytes."""

    offset: int
    number: int
    text: bytes


class _Sample(msgspec.Struct):
    """What a line must have; values are looked at for their syntax only, which is fast."""

    input: msgspec.Raw
    label: msgspec.Raw


def open_lines(path: Path) -> BinaryIO:
    """The file, to be read. Raises ChunkError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ChunkError(f"{path} cannot be read: {error.strerror}") from None


def scan(file: BinaryIO, path: Path) -> Iterator[Line]:
    """Every line that is not blank; at the end, ChunkError names all those that are broken."""
    offset, broken = 0, list[str]()
    for number, text in enumerate(file, start=1):
        if text.strip():
            try:
                check(text)
            except ValueError as error:
                broken.append(f"{path}:{number}: {error}")
            else:
                yield Line(offset, number, text)
        offset += len(text)
    if broken:
        more = len(broken) - _SHOWN_LINES
        shown = broken[:_SHOWN_LINES] + [f"and {more} more"] * (more > 0)
        raise ChunkError(
            "\n".join(["lines that are no samples:", *shown]),
            hint='each line is a JSON object with "input" and "label"; mend or remove these',
        )


def check(text: bytes) -> None:
    """Raise ValueError, saying what is wrong, unless the line is a sample."""
    try:
        msgspec.json.decode(text, type=_Sample)
        text.decode()  # it passes over texts without a look at their bytes
        doubtful = _LONG in text.translate(_TO_ZEROS)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        doubtful = True  # Python's json writes NaN and Infinity, which are no JSON
    if doubtful:
        sample_of(text)


def sample_of(text: bytes) -> tuple[Any, Any]:
    """Input and label of a line. Raises ValueError."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not an object with input and label")
    fields = cast("dict[str, Any]", found)
    missing = [key for key in ("input", "label") if key not in fields]
    if missing:
        raise ValueError(f"without {' and '.join(missing)}")
    return fields["input"], fields["label"]
