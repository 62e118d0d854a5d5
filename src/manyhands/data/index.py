"""Index: where in a file each sample begins, in a file beside it. No sample is looked for twice.

512 bytes of a header (JSON, filled up with spaces), then unsigned 64-bit numbers, little-endian:
where each sample begins and where the last one ends; then, for every line that is no sample's
first (blank, of a header, inside a quoted text), the number of the sample that follows it, sorted.
So a place costs two reads wherever it is, and nothing of the index is kept in memory.

An index belongs to one state of one file: by its size, its time of change, and a digest of its
first and last bytes. It is written beside its name and then renamed: it is whole, or not there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import sys
import weakref
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from manyhands.core.errors import UsageError
from manyhands.data.access import Fingerprint
from manyhands.data.drafts import drafting, turn

SUFFIX = ".mhindex"
_PLAIN = "jsonl"  # the kind whose index has no more in its name than that
_MAGIC = b'{"manyhands_index":'
_HEADER = 512  # bytes
_WORD = 8
_BATCH = 1 << 15  # numbers that are written at once
_TURN_S = 600.0  # for another process that writes the same; then this one does it too

Found = tuple[int, int, bytes]
"""Of a sample: where it begins, the number of its first line (from 1), its bytes."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    manyhands_index: int
    kind: str
    size: int
    mtime_ns: int
    ends: str
    samples: _Count
    extra: _Count  # lines that are no sample's first


class Index:
    """One that is open. It is closed when nobody has it any more."""

    def __init__(self, path: Path, number: int, header: _Header) -> None:
        self.path, self._number = path, number
        self._samples, self._extra = header.samples, header.extra
        weakref.finalize(self, os.close, number)

    def __len__(self) -> int:
        return self._samples

    def span(self, sample: int) -> tuple[int, int]:
        """Where a sample begins, and where it ends at the latest."""
        found = os.pread(self._number, 2 * _WORD, _HEADER + _WORD * sample)
        start, stop = struct.unpack("<QQ", found)
        return start, stop

    def line(self, sample: int) -> int:
        """The number of its first line, from 1."""
        low, high = 0, self._extra
        while low < high:
            middle = (low + high) // 2
            if self._extra_at(middle) <= sample:
                low = middle + 1
            else:
                high = middle
        return sample + 1 + low

    def _extra_at(self, place: int) -> int:
        at = _HEADER + _WORD * (self._samples + 1 + place)
        return struct.unpack("<Q", os.pread(self._number, _WORD, at))[0]


def places_for(place: str, kind: str, *, beside: Path | None) -> list[Path]:
    """Where the index of a file may be, the best first. `beside`: the file's path, if it has one.

    The others are where a folder cannot be written, and where there is none. Each kind of samples
    has its own, so that none takes the place of another's.
    """
    suffix = SUFFIX if kind == _PLAIN else f".{_digest(kind, 4)}{SUFFIX}"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cached = Path(base) / "manyhands" / "index" / f"{_digest(place, 16)}{suffix}"
    places = [] if beside is None else [beside.with_name(beside.name + suffix)]
    return [*places, cached] if cached.is_absolute() else places  # not everybody has a home


def _digest(text: str, size: int) -> str:
    data = text.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def find(places: Sequence[Path], kind: str, of: Fingerprint) -> Index | None:
    """The first that is there and belongs to this state of the file."""
    for path in places:
        index = _opened(path, kind, of)
        if index is not None:
            return index
    return None


def build(
    places: Sequence[Path], kind: str, of: Fingerprint, scan: Callable[[], Iterable[Found]]
) -> Index:
    """Write one, in the first place where that can be done. Raises UsageError.

    `scan` gives all samples in order, each time that it is called; what it raises is raised. Who
    comes while another process writes it waits for that one, and scans nothing.
    """
    reasons: list[str] = []
    for path in places:
        _check_is_ours(path)
        with turn(path.parent, path.name, _TURN_S):
            index = find(places, kind, of)  # of whoever had a turn before
            if index is not None:
                return index
            try:
                _put_at(path, kind, of, scan)
            except _Unwritable as error:
                reasons.append(f"{path}: {error}")
                continue
        index = _opened(path, kind, of)
        if index is not None:
            return index
        reasons.append(f"{path}: somebody else writes it, and for another state of the file")
    raise UsageError(
        "an index of the samples can be written nowhere: " + ("; ".join(reasons) or "no folder"),
        hint="say where it can be: index=PATH",
    )


def _put_at(path: Path, kind: str, of: Fingerprint, scan: Callable[[], Iterable[Found]]) -> None:
    with ExitStack() as stack:
        with _writing():
            draft = stack.enter_context(drafting(path.parent, path.name))
        _write(draft.number, kind, of, scan())
        with _writing():
            draft.path.replace(path)


def _opened(path: Path, kind: str, of: Fingerprint) -> Index | None:
    try:
        # Of a pipe nobody waits for the writer.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None  # what is wrong with the place is said when it is to be written
    try:
        header = _read_header(number)
        if header is not None:
            words = header.samples + 1 + header.extra
            whole = os.fstat(number).st_size == _HEADER + _WORD * words
            state = Fingerprint(header.size, header.mtime_ns, header.ends)
            if whole and state == of and header.kind == kind:
                index = Index(path, number, header)
                number = -1
                return index
    finally:
        if number >= 0:
            os.close(number)
    return None


def _read_header(number: int) -> _Header | None:
    try:
        return msgspec.json.decode(os.pread(number, _HEADER, 0), type=_Header)
    except (OSError, msgspec.DecodeError):  # a folder; something else, or half of one
        return None


def _check_is_ours(path: Path) -> None:
    """Nothing else is written over."""
    try:
        mode = path.stat().st_mode
        ours = stat.S_ISDIR(mode)  # where none can be put; that is said then
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                ours = _MAGIC.startswith(file.read(len(_MAGIC)))  # half of one can go, too
    except OSError:
        return
    if not ours:
        raise UsageError(
            f"{path} is there, and is no index",
            hint="move it away, or say where the index may be: index=PATH",
        )


def _write(number: int, kind: str, of: Fingerprint, samples: Iterable[Found]) -> None:
    """Header last: what is not whole has none."""
    at = _HEADER
    starts, extra, count = array("Q"), array("Q"), 0
    for start, line, _ in samples:
        extra.extend([count] * (line - (count + len(extra) + 1)))
        starts.append(start)
        count += 1
        if len(starts) == _BATCH:
            at = _put(number, at, starts)
            del starts[:]
    starts.append(of.size)
    at = _put(number, _put(number, at, starts), extra)
    header = msgspec.json.encode(_Header(1, kind, of.size, of.mtime_ns, of.ends, count, len(extra)))
    if len(header) > _HEADER:
        raise UsageError(f"an index of {kind[:80]}...: too much to say of its kind")
    with _writing():
        os.pwrite(number, header.ljust(_HEADER), 0)
        os.fsync(number)


def _put(number: int, at: int, words: array[int]) -> int:
    if sys.byteorder == "big":
        words.byteswap()
    left = memoryview(words).cast("B")
    with _writing():
        while left:
            written = os.pwrite(number, left, at)
            left, at = left[written:], at + written
    return at


class _Unwritable(Exception):
    pass


@contextmanager
def _writing() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _Unwritable(error.strerror) from error
