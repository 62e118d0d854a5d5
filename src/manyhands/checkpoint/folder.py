"""Folder: where files of checkpoints lie, on a file system of this machine or behind a URL.

A checkpoint is written in two steps: a draft that nobody reads, and a manifest that makes it count.
A folder knows how to do either so that a crash at any moment leaves no manifest without its draft.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from manyhands.core.address import redact
from manyhands.core.errors import CheckpointError, ManyhandsError, UsageError
from manyhands.core.locks import NO_LOCKS, create_locked
from manyhands.wire.frames import Buffer, as_bytes

ABANDONED_AFTER = timedelta(days=1)
"""A draft behind a URL, where there are no locks, that nobody has written to for so long."""

_HINTS = {
    errno.ENOSPC: "make room there: it takes one checkpoint more than are kept",
    errno.EDQUOT: "make room there, or have the quota raised",
    errno.EFBIG: "the file system or a limit of this process (ulimit -f) allows no larger files",
    errno.EACCES: "make the folder writable for this user, or name another one",
    errno.EPERM: "make the folder writable for this user, or name another one",
    errno.EROFS: "it is mounted read-only: name another folder",
    errno.ENOTDIR: "name a folder, not a file",
}


class File(Protocol):
    """An open file. Everything it raises is a CheckpointError that names it."""

    def read(self, size: int) -> bytes:
        """That many bytes, or fewer at the end of the file."""
        ...

    def write(self, data: Buffer) -> None:
        """All of it."""
        ...

    def finish(self) -> None:
        """What was written outlives a crash of this process, and of the machine if possible."""
        ...


class Folder(Protocol):
    """Files by name. Everything it raises is a CheckpointError; a folder need not exist yet."""

    def locate(self, name: str) -> str:
        """The place of a file in words for the user, without secrets."""
        ...

    def sizes(self) -> dict[str, int]:
        """The files that are here, and their sizes in bytes."""
        ...

    def open(self, name: str) -> AbstractContextManager[File]:
        """A file to read."""
        ...

    def draft(self, name: str) -> AbstractContextManager[File]:
        """A new file to write; inside the block `clear` leaves it alone. An error removes it."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """A new file that is there as a whole or not at all, also after a crash."""
        ...

    def remove(self, name: str) -> None:
        """A file that is gone already is no error."""
        ...

    def clear(self, draft: str, manifest: str) -> None:
        """Remove a draft whose writer died, but neither one at work nor one with its manifest."""
        ...

    def folders(self) -> list[str]:
        """The names of the folders in this one."""
        ...

    def drop(self, name: str) -> None:
        """A folder in this one, with all that is in it. One that is gone already is no error."""
        ...


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """From a path or any URL that fsspec knows. Raises UsageError; touches nothing."""
    text = os.fspath(url)
    try:
        system, path = cast("tuple[Any, str]", fsspec.url_to_fs(text))  # pyright: ignore[reportUnknownMemberType]
    except ImportError as error:
        raise UsageError(f"{redact(text)!r} needs a package: {error}") from None
    except ValueError as error:
        raise UsageError(
            f"{redact(text)!r} is no place for checkpoints: {redact(str(error))}",
            hint="give a folder, or a URL like s3://bucket/folder",
        ) from None
    if isinstance(system, LocalFileSystem):
        return LocalFolder(Path(path))
    return UrlFolder(system, path.rstrip("/"), redact(text).rstrip("/"))


@contextmanager
def _named(what: str) -> Generator[None]:
    """Whatever a file system raises, as a CheckpointError that begins with `what`."""
    try:
        yield
    except ManyhandsError:
        raise
    except Exception as error:  # noqa: BLE001 - systems behind URLs have error classes of their own
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else f"{type(error).__name__} {error}".strip()
        raise CheckpointError(
            f"{what}: {redact(reason)[:500]}", hint=_HINTS.get(number or 0)
        ) from None  # its own text may quote a password


class LocalFolder:
    """A folder of this machine. A draft is locked while somebody is at work on it.

    The kernel drops the lock with the process. On network file systems whose locks do not reach
    from machine to machine, a draft of another machine can be cleared too early: that save fails.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def locate(self, name: str) -> str:
        return str(self._path / name)

    def sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with _named(f"{self._path} cannot be listed"):
            try:
                entries = os.scandir(self._path)
            except FileNotFoundError:
                return sizes
            with entries:
                for entry in entries:
                    try:
                        if entry.is_file():
                            sizes[entry.name] = entry.stat().st_size
                    except FileNotFoundError:
                        pass  # removed since it was listed
                    except OSError:
                        if not entry.is_symlink():  # else it leads round, or where we may not
                            raise
        return sizes

    @contextmanager
    def open(self, name: str) -> Generator[File]:
        path = self._path / name
        with _named(f"{path} cannot be read"):
            file = os.open(path, os.O_RDONLY)
        try:
            yield _LocalFile(file, path)
        finally:
            os.close(file)

    @contextmanager
    def draft(self, name: str) -> Generator[File]:
        path = self._path / name
        with _named(f"{path} cannot be written"):
            self._path.mkdir(parents=True, exist_ok=True)
            file = create_locked(path)
        try:
            yield _LocalFile(file, path)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(file)

    def put(self, name: str, data: bytes) -> None:
        path, part = self._path / name, self._part(name)
        with _named(f"{path} cannot be written"):
            try:
                with part.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
                _sync_folder(self._path)
            except BaseException:
                for half in (path, part):
                    with suppress(OSError):
                        half.unlink()
                raise

    def remove(self, name: str) -> None:
        with _named(f"{self._path / name} cannot be removed"):
            (self._path / name).unlink(missing_ok=True)

    def clear(self, draft: str, manifest: str) -> None:
        path = self._path / draft
        with _named(f"{path} cannot be removed"):
            try:
                file = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                return
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # With the lock and not before: its writer may have finished just now.
                if not (self._path / manifest).exists():
                    self._part(manifest).unlink(missing_ok=True)
                    path.unlink(missing_ok=True)
            except OSError as error:
                # Somebody is at work on it, or nobody can tell because there are no locks here.
                if error.errno not in (errno.EWOULDBLOCK, *NO_LOCKS):
                    raise
            finally:
                os.close(file)

    def folders(self) -> list[str]:
        with _named(f"{self._path} cannot be listed"):
            try:
                with os.scandir(self._path) as entries:
                    return [e.name for e in entries if e.is_dir(follow_symlinks=False)]
            except FileNotFoundError:
                return []

    def drop(self, name: str) -> None:
        with (
            _named(f"{self._path / name} cannot be removed"),
            suppress(FileNotFoundError),
        ):
            shutil.rmtree(self._path / name)

    def _part(self, name: str) -> Path:
        return self._path / f".{name}.part"


def _sync_folder(path: Path) -> None:
    """So that a rename in it outlives a crash of the machine."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system whose folders cannot be synced
            raise
    finally:
        os.close(folder)


class _LocalFile:
    """Unbuffered: nothing is left to write when it is closed."""

    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path

    def read(self, size: int) -> bytes:
        with _named(f"{self._path} cannot be read"):
            return os.read(self._file, size)

    def write(self, data: Buffer) -> None:
        left = as_bytes(data)
        with _named(f"{self._path} cannot be written"):
            while left:
                left = left[os.write(self._file, left) :]

    def finish(self) -> None:
        with _named(f"{self._path} cannot be written"):
            os.fsync(self._file)
        if not os.fstat(self._file).st_nlink:
            raise CheckpointError(f"{self._path} was removed while it was being written")


class UrlFolder:
    """A folder behind a URL. No renames, no locks: a file appears under its name, if all goes well
    as a whole. What never got its manifest is cleared a day later.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:  # noqa: ANN401
        self._system, self._path, self._url = system, path, url

    def locate(self, name: str) -> str:
        return f"{self._url}/{name}"

    def sizes(self) -> dict[str, int]:
        return {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0)
            for entry in self._entries()
            if entry["type"] == "file"
        }

    def _entries(self) -> list[dict[str, Any]]:
        with _named(f"{self._url} cannot be listed"):
            self._system.invalidate_cache(self._path)  # others write there too
            try:
                return self._system.ls(self._path, detail=True)
            except FileNotFoundError:
                return []

    @contextmanager
    def open(self, name: str) -> Generator[File]:
        with _named(f"{self.locate(name)} cannot be read"):
            raw = self._system.open(f"{self._path}/{name}", "rb")
        with raw:
            yield _UrlFile(raw, self.locate(name))

    @contextmanager
    def draft(self, name: str) -> Generator[File]:
        path = f"{self._path}/{name}"
        with _named(f"{self.locate(name)} cannot be written"):
            try:
                raw = self._system.open(path, "wb")
            except FileNotFoundError:  # not every system takes a folder for granted
                self._system.makedirs(self._path, exist_ok=True)
                raw = self._system.open(path, "wb")
        try:
            yield _UrlFile(raw, self.locate(name))
        except BaseException:
            # Closing may send what is left, so first close, then remove; the error that led here
            # is the one to tell.
            with suppress(Exception):
                raw.close()
            with suppress(Exception):
                self._system.rm_file(path)
            raise

    def put(self, name: str, data: bytes) -> None:
        path = f"{self._path}/{name}"
        with _named(f"{self.locate(name)} cannot be written"):
            try:
                self._system.pipe_file(path, data)
            except BaseException:
                with suppress(Exception):
                    self._system.rm_file(path)
                raise

    def remove(self, name: str) -> None:
        with _named(f"{self.locate(name)} cannot be removed"), suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{name}")

    def clear(self, draft: str, manifest: str) -> None:
        path = f"{self._path}/{draft}"
        with (
            _named(f"{self.locate(draft)} cannot be removed"),
            # Gone meanwhile, or a system that knows no times: then nobody can tell.
            suppress(FileNotFoundError, NotImplementedError),
        ):
            touched: datetime = self._system.modified(path)
            if touched.tzinfo is None:
                touched = touched.replace(tzinfo=UTC)
            old = datetime.now(UTC) - touched > ABANDONED_AFTER
            if old and not self._system.exists(f"{self._path}/{manifest}"):
                self._system.rm_file(path)

    def folders(self) -> list[str]:
        return [
            str(entry["name"]).rstrip("/").rpartition("/")[2]
            for entry in self._entries()
            if entry["type"] == "directory"
        ]

    def drop(self, name: str) -> None:
        with _named(f"{self.locate(name)} cannot be removed"), suppress(FileNotFoundError):
            self._system.rm(f"{self._path}/{name}", recursive=True)


class _UrlFile:
    def __init__(self, raw: Any, place: str) -> None:  # noqa: ANN401
        self._raw, self._place = raw, place

    def read(self, size: int) -> bytes:
        with _named(f"{self._place} cannot be read"):
            return bytes(self._raw.read(size))

    def write(self, data: Buffer) -> None:
        with _named(f"{self._place} cannot be written"):
            self._raw.write(data)

    def finish(self) -> None:
        with _named(f"{self._place} cannot be written"):
            self._raw.close()
