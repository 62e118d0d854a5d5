"""Stores: where the bytes of a data set lie, seen as files and folders by key.

A key is a path with '/' between its parts (spec.parts_of); '' is the root, which is a file where
the data set is one. Stores only read. They are plain values: pickled, they open their file system
anew in the process that they come to.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast
from urllib.parse import quote, unquote

from manyhands.core.errors import DataError, ManyhandsError, NotThere, UsageError
from manyhands.data.secret import redacted

Kind = Literal["file", "folder"]
_EXTRAS = {"s3": "manyhands[s3]", "s3a": "manyhands[s3]"}  # by what a URL begins with
# What file systems of fsspec call what changes with a file, the most exact first.
_VERSIONS = (
    *("ETag", "etag", "blob_id", "Content-MD5", "md5Hash", "CRC"),
    *("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "updated", "created"),
)
_HINTS = {  # by the names of errors that botocore raises
    "NoCredentialsError": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of "
    "~/.aws; for a public bucket, say anon = true",
    "ProfileNotFound": "name a profile that ~/.aws/credentials or ~/.aws/config has",
}
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_GONE = (404, 410)  # what a web server says of a page that it does not have
_RANGES = (  # what fsspec says of a web server that has whole pages only, and what can be done
    "range requests",
    "keep a copy: cache = true in its entry of a Data.toml; or fetch it first",
)


class Store(Protocol):
    """Files and folders by key. Whatever goes wrong is a DataError that names the place."""

    @property
    def identity(self) -> str:
        """What tells this store from others, the same in every process; not to be shown."""
        ...

    def place(self, key: str) -> str:
        """Where a key lies, in words for the user, without secrets."""
        ...

    def kind(self, key: str) -> Kind | None:
        """What is there, or None."""
        ...

    def entries(self, key: str) -> dict[str, Kind]:
        """The names in a folder, sorted. Raises NotThere."""
        ...

    def open(self, key: str) -> BinaryIO:
        """A file, to be read. Raises NotThere."""
        ...

    def size(self, key: str) -> int:
        """Of a file, in bytes. Raises NotThere."""
        ...

    def version(self, key: str) -> str:
        """What is another text when a file has changed, where the place says so; else ''."""
        ...

    def local(self, key: str) -> Path | None:
        """The file of this machine that a key is; None where there is no such file (yet)."""
        ...


@contextmanager
def named(what: str) -> Generator[None]:
    """Whatever a file system raises, as a DataError that begins with `what`."""
    try:
        yield
    except ManyhandsError:
        raise
    except Exception as error:  # noqa: BLE001 - systems behind URLs have error classes of their own
        error = _outage(error) or error
        if isinstance(error, _NOT_THERE):
            raise NotThere(f"{what}: there is no such file or folder") from None
        number = (error.errno or 0) if isinstance(error, OSError) else 0
        # Those of looking up a name are below 0.
        reason = os.strerror(number) if number > 0 else f"{type(error).__name__} {error}".strip()
        raise DataError(
            f"{what}: {redacted(reason)[:500]}",  # it may quote a password
            hint=_RANGES[1] if _RANGES[0] in reason else _HINTS.get(type(error).__name__),
        ) from None


def _outage(error: Exception) -> BaseException | None:
    """What is behind a file that is said not to be there: for fsspec, whatever fails on the way to
    a web server means that. None if it is not there.
    """
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or isinstance(cause, _NOT_THERE):
        return None
    if type(cause).__module__.partition(".")[0] == "aiohttp":
        return None if getattr(cause, "status", None) in _GONE else cause
    # Those of other packages mean what they are called: a hub's answer may be an OSError too.
    is_ours = type(cause).__module__ in ("builtins", "socket")
    return cause if isinstance(cause, OSError) and is_ours else None


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A file or folder of this machine. Links are followed."""

    root: str

    @property
    def identity(self) -> str:
        return f"file:{self.root}"

    def place(self, key: str) -> str:
        return os.path.join(self.root, key) if key else self.root

    def kind(self, key: str) -> Kind | None:
        place = self.place(key)
        try:
            with named(f"{place} cannot be looked at"):
                mode = os.stat(place).st_mode
        except NotThere:
            return None
        return "folder" if stat.S_ISDIR(mode) else "file"

    def entries(self, key: str) -> dict[str, Kind]:
        place = self.place(key)
        found: dict[str, Kind] = {}
        with named(f"{place} cannot be listed"), os.scandir(place) as entries:
            for entry in entries:
                is_folder = _leads_to_folder(entry)
                if is_folder and entry.is_symlink():
                    self._refuse_circle(key, entry.path)
                found[entry.name] = "folder" if is_folder else "file"
        return dict(sorted(found.items()))

    def _refuse_circle(self, key: str, link: str) -> None:
        above = Path(self.place(key))
        for folder in (above, *above.parents):
            if os.path.samefile(folder, link):
                raise DataError(
                    f"{link} is a link to a folder that it lies in: the tree has no end",
                    hint="remove the link",
                )
            if str(folder) == self.root:
                return

    def open(self, key: str) -> BinaryIO:
        place = self.place(key)
        with named(f"{place} cannot be read"):
            mode = os.stat(place).st_mode
            # Who opens a pipe waits for its writer, and some devices have no end.
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise NotThere(f"{place} is no plain file, but a pipe, a device or a socket")
            return open(place, "rb")

    def size(self, key: str) -> int:
        place = self.place(key)
        with named(f"{place} cannot be looked at"):
            return os.stat(place).st_size

    def version(self, key: str) -> str:
        place = self.place(key)
        with named(f"{place} cannot be looked at"):
            return str(os.stat(place).st_mtime_ns)

    def local(self, key: str) -> Path | None:
        return Path(self.place(key))


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        if entry.is_symlink():  # one that leads to itself, say: it shows when it is read
            return False
        raise


Embedded = Mapping[str, "Embedded | bytes"]


@dataclass(frozen=True, slots=True)
class TomlStore:
    """Data that stand in the Data.toml itself; `source` names the file and the entry."""

    source: str
    data: Embedded | bytes = field(repr=False, compare=False)

    @property
    def identity(self) -> str:
        return f"toml:{self.source}"

    def place(self, key: str) -> str:
        return f"{self.source}#{key}" if key else self.source

    def kind(self, key: str) -> Kind | None:
        found = self._find(key)
        if found is None:
            return None
        return "file" if isinstance(found, bytes) else "folder"

    def entries(self, key: str) -> dict[str, Kind]:
        found = self._find(key)
        if found is None or isinstance(found, bytes):
            raise NotThere(f"{self.place(key)} cannot be listed: there is no such folder")
        return {
            name: "file" if isinstance(value, bytes) else "folder"
            for name, value in sorted(found.items())
        }

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self._bytes(key))

    def size(self, key: str) -> int:
        return len(self._bytes(key))

    def version(self, key: str) -> str:
        return ""  # it has no time of its own

    def local(self, key: str) -> Path | None:
        return None

    def _bytes(self, key: str) -> bytes:
        found = self._find(key)
        if not isinstance(found, bytes):
            raise NotThere(f"{self.place(key)} cannot be read: there is no such file")
        return found

    def _find(self, key: str) -> Embedded | bytes | None:
        found: Embedded | bytes | None = self.data
        for part in key.split("/") if key else ():
            if found is None or isinstance(found, bytes):
                return None
            found = found.get(part)
        return found


@dataclass(slots=True, eq=False, repr=False)
class UrlStore:
    """Anything that fsspec can read: `url` as a user writes it, `options` for its file system.

    With `path`, `url` is for messages only, and `protocol` and `path` say where to go: a path may
    have characters that mean something in a URL. Listings may be remembered by the file system.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    protocol: str | None = None
    path: str | None = None
    # Of this process: file systems have threads and sockets, which neither fork nor pickle.
    _system: tuple[int, Any, str] | None = field(default=None, init=False)

    @property
    def identity(self) -> str:
        options = sorted((key, repr(value)) for key, value in self.options.items())
        return f"url:{self.url}:{options}"

    def __repr__(self) -> str:
        return f"UrlStore({redacted(self.url)!r})"  # options may be secrets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlStore) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __reduce__(self) -> tuple[Any, ...]:
        return (UrlStore, (self.url, self.options, self.protocol, self.path))

    def place(self, key: str) -> str:
        shown = redacted(self.url)
        return f"{shown.rstrip('/')}/{key}" if key else shown

    def kind(self, key: str) -> Kind | None:
        try:
            with named(f"{self.place(key)} cannot be looked at"):
                system, path = self._at(key)
                return _kind(system.info(path))
        except NotThere:
            return None

    def entries(self, key: str) -> dict[str, Kind]:
        found: dict[str, Kind] = {}
        with named(f"{self.place(key)} cannot be listed"):
            system, path = self._at(key)
            for entry in cast("list[dict[str, Any]]", system.ls(path, detail=True)):
                whole = str(entry["name"]).rstrip("/")
                name = whole.rpartition("/")[2]
                name = unquote(name) if _is_web(path) else name
                if whole.strip("/") == path.strip("/"):
                    continue  # a folder can be marked by an empty object of its own name
                if name in ("", ".", ".."):
                    raise DataError(f"{redacted(whole)} has a name that no file here can have")
                found[name] = _kind(entry)
        return dict(sorted(found.items()))

    def open(self, key: str) -> BinaryIO:
        what = f"{self.place(key)} cannot be read"
        with named(what):
            system, path = self._at(key)
            raw = system.open(path, "rb")
        # Those that work by a loop of their own are good for any thread; the files of others may
        # share a connection, or a position. A file may be of another system than the one asked.
        ranged = getattr(getattr(raw, "fs", None), "async_impl", False)
        fetch = getattr(raw, "_fetch_range", None) if ranged else None
        return cast("BinaryIO", io.BufferedReader(_Reader(raw, what, fetch), 1 << 17))

    def size(self, key: str) -> int:
        with named(f"{self.place(key)} cannot be looked at"):
            system, path = self._at(key)
            return int(system.info(path)["size"])

    def version(self, key: str) -> str:
        with named(f"{self.place(key)} cannot be looked at"):
            system, path = self._at(key)
            info = cast("Mapping[str, Any]", system.info(path))
        return next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), "")

    def local(self, key: str) -> Path | None:
        return None

    def _at(self, key: str) -> tuple[Any, str]:
        """The file system of this process, and the path in it."""
        if self._system is None or self._system[0] != os.getpid():
            self._system = (os.getpid(), *self._connect())
        _, system, root = self._system
        if not key:
            return system, root
        asked = quote(key) if _is_web(root) else key
        return system, f"{root.rstrip('/')}/{asked}" if root else asked

    def _connect(self) -> tuple[Any, str]:
        import fsspec  # nothing before needs it, and it takes its time

        try:
            if self.protocol is not None and self.path is not None:
                return fsspec.filesystem(self.protocol, **self.options), self.path  # pyright: ignore[reportUnknownMemberType]
            return cast("tuple[Any, str]", fsspec.url_to_fs(self.url, **self.options))  # pyright: ignore[reportUnknownMemberType]
        except ImportError as error:
            scheme = self.protocol or self.url.rpartition("::")[2].partition("://")[0]
            extra = _EXTRAS.get(scheme)
            raise UsageError(
                f"{redacted(self.url)} needs a package: {error}",
                hint=None if extra is None else f"pip install '{extra}'",
            ) from None
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{redacted(self.url)} cannot be opened: {redacted(str(error))[:500]}",
                hint="give a folder, or a URL and options that fsspec knows: "
                "s3://bucket/folder, gs://..., https://...",
            ) from None


def _is_web(path: str) -> bool:
    """Whether a path of this file system is a URL itself, where some characters are escaped."""
    return path.startswith(("http://", "https://"))


def _kind(info: Mapping[str, Any]) -> Kind:
    # A web server has pages only; one that lists a folder is at a URL that ends in a slash.
    is_folder = info["type"] == "directory" or str(info.get("url", "")).endswith("/")
    return "folder" if is_folder else "file"


class _Reader(io.RawIOBase):
    """A file behind a URL; what goes wrong with it says which file it was.

    `ranged(start, stop)` gives so many bytes and no more: of the file that was opened where its
    system sees to that, as S3's does; else of what lies there by then. To `read` is to read ahead
    too, as the file system likes: 50 MB of a bucket.
    """

    def __init__(
        self,
        raw: Any,  # noqa: ANN401
        what: str,
        ranged: Callable[[int, int], bytes] | None,
    ) -> None:
        self._raw, self._what, self._ranged = raw, what, ranged
        self.size: int | None = getattr(raw, "size", None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._raw.seekable())

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        with named(self._what):
            data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @property
    def fetch(self) -> Callable[[int, int], bytes] | None:
        """Without a position; from any thread."""
        ranged, what = self._ranged, self._what
        if ranged is None:
            return None

        def fetch(start: int, stop: int) -> bytes:
            with named(what):
                return ranged(start, stop)

        return fetch

    def seek(self, offset: int, whence: int = 0) -> int:
        with named(self._what):
            return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def is_url(place: str) -> bool:
    """Whether it is for fsspec; else it is a path of this machine."""
    return "://" in place or "::" in place


def store_at(place: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """The store of a path or fsspec URL. Touches nothing. Raises UsageError."""
    text = os.fspath(place)
    if isinstance(place, str) and is_url(text) and not text.startswith("file://"):
        return UrlStore(text, dict(options or {}))
    if options:
        raise UsageError(
            f"{text!r} is a path of this machine, which takes no options",
            hint=f"leave out {', '.join(sorted(options))}",
        )
    path = os.path.expanduser(text.removeprefix("file://"))
    if not path or "\0" in path:
        raise UsageError(f"{text!r} is no path", hint="give a folder, a file, or a URL")
    return LocalStore(os.path.abspath(path))
