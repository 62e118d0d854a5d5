"""Chunks: the lines of a JSONL file, dealt round-robin into N files: line i to chunk i % N.

Blank lines do not count. The chunks are a function of the file and N alone; those of an earlier
time are replaced, each at one moment, once all are written.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec

from manyhands.core.errors import DataError, UsageError
from manyhands.data.access import lines_of
from manyhands.data.drafts import Draft, drafting

_SHOWN_LINES = 10  # of those that are broken
_DRAFT = "chunk"
_GZIP = b"\x1f\x8b"  # how such files begin, whatever they are called
_MANY = "all chunks are written at once: make fewer, or let more files be open (ulimit -n)"


def split(data: Path, num: int, folder: Path | None = None) -> dict[Path, int]:
    """Deal the lines of `data` into `num` files, `NAME-0-of-3.jsonl` and so on, beside it.

    Or in `folder`, which is made. Returns their paths and how many lines they have. With a line
    that is no JSON nothing is written, and UsageError names the first of them. Raises DataError.
    """
    if num < 1:
        raise UsageError(f"{num} chunks cannot be made", hint="1 or more")
    folder = data.parent if folder is None else folder
    chunks = [folder / f"{data.stem}-{n}-of-{num}{data.suffix}" for n in range(num)]
    try:
        if data.exists() and not (data.is_file() or data.is_dir()):
            # Who opens a pipe waits for its writer, and some devices have no end.
            raise UsageError(
                f"{data} is no plain file, but a pipe, a device or a socket",
                hint="write what comes from it to a file first",
            )
        folder.mkdir(parents=True, exist_ok=True)
        with data.open("rb") as source:
            if source.peek(len(_GZIP)).startswith(_GZIP):
                raise UsageError(f"{data} is compressed", hint=f"unpack it first: gzip -dk {data}")
            lines = lines_of(source.read1, str(data))
            counts = deal(scan(lines, data), chunks, data)
    except OSError as error:
        raise DataError(
            f"{data} cannot be split: {error.strerror} ({error.filename})",
            hint=_MANY if error.errno == errno.EMFILE else None,
        ) from None
    return dict(zip(chunks, counts, strict=True))


def scan(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Every line that is not blank, without a byte-order mark. At the end, UsageError names the
    first that are no JSON, and says how many there are.
    """
    broken: list[str] = []  # the first of them
    count = 0
    for number, text in enumerate(file, start=1):
        line = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
        if line.strip():
            try:
                check_json(line)
            except ValueError as error:
                count += 1
                if count <= _SHOWN_LINES:
                    broken.append(f"{path}:{number}: {error}")
            else:
                yield line
    if broken:
        more = count - len(broken)
        shown = broken + [f"and {more} more"] * (more > 0)
        raise UsageError(
            "\n".join(["lines that are no JSON:", *shown]), hint="mend or remove these"
        )


def check_json(text: bytes) -> None:
    """Raise ValueError unless the line is one JSON value, NaN and Infinity allowed."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)  # the syntax only, which is fast
        text.decode()  # it passes over texts without a look at their bytes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None


def deal(lines: Iterable[bytes], chunks: Sequence[Path], data: Path) -> list[int]:
    """Write line i to chunk i % n, atomically, with the rights of `data`, where they come from.

    Returns how many lines each got. If `lines` raises, nothing is written. Raises OSError, and
    UsageError if a chunk would replace `data`.
    """
    counts = [0] * len(chunks)
    with ExitStack() as stack:
        if any(chunk.exists() and chunk.samefile(data) for chunk in chunks):  # by a link, too
            raise UsageError(f"{data} would be replaced by a chunk of itself", hint="rename it")
        # Until it has the rights of `data`, which may be few, it is its writer's only.
        drafts: list[Draft] = []
        cleared: set[Path] = set()  # once: else each would look through all that are made here
        for place in (chunk.parent for chunk in chunks):
            draft = drafting(place, _DRAFT, 0o600, clears=place not in cleared)
            drafts.append(stack.enter_context(draft))
            cleared.add(place)
        writing = [stack.enter_context(open(d.number, "wb", closefd=False)) for d in drafts]
        for place, line in enumerate(lines):
            writing[place % len(chunks)].write(line.rstrip(b"\r\n") + b"\n")
            counts[place % len(chunks)] += 1
        for file in writing:
            file.flush()
            os.fsync(file.fileno())
        for draft, chunk in zip(drafts, chunks, strict=True):
            os.fchmod(draft.number, data.stat().st_mode & 0o777)
            os.replace(draft.path, chunk)
    return counts
