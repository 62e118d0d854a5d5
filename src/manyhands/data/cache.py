"""Cache: copies of files that were read once, in a folder of this machine.

A copy appears under its name as a whole or not at all, whenever its writer is killed: it is
written into `parts`, locked while somebody is at work on it, and renamed. Data sets are taken for
fixed: a copy is never compared with its source again. To fetch anew, remove the folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from manyhands.core.errors import DataError
from manyhands.data.drafts import Draft, drafting
from manyhands.data.stores import Kind, Store, named

_COPY_BYTES = 1 << 20  # at a time


@dataclass(frozen=True, slots=True)
class CachedStore:
    """Another store, whose files are read from copies in `folder`; any number of processes."""

    inner: Store
    folder: str

    @property
    def identity(self) -> str:
        return self.inner.identity

    def place(self, key: str) -> str:
        return self.inner.place(key)

    def kind(self, key: str) -> Kind | None:
        return "file" if self._copy(key).is_file() else self.inner.kind(key)

    def entries(self, key: str) -> dict[str, Kind]:
        return self.inner.entries(key)

    def open(self, key: str) -> BinaryIO:
        copy = self._fetch(key)
        with named(f"{self.place(key)}: its copy {copy} cannot be read"):
            return copy.open("rb")

    def size(self, key: str) -> int:
        try:
            return self._copy(key).stat().st_size
        except FileNotFoundError:
            return self.inner.size(key)

    def version(self, key: str) -> str:
        return ""  # data sets are taken for fixed

    def local(self, key: str) -> Path | None:
        return self._fetch(key)

    def _copy(self, key: str) -> Path:
        # By digest: names of objects may be longer than those of files, or both file and folder.
        store = hashlib.sha256(self.inner.identity.encode(errors="surrogateescape")).hexdigest()
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
        return Path(self.folder) / store[:16] / name[:2] / name

    def _fetch(self, key: str) -> Path:
        copy = self._copy(key)
        if not copy.is_file():
            with self.inner.open(key) as source, _writing(self.folder, self.place(key)) as part:
                with open(part.number, "wb", closefd=False) as file:
                    shutil.copyfileobj(source, file, _COPY_BYTES)
                    got = file.tell()
                expected = getattr(getattr(source, "raw", None), "size", None)
                if expected is not None and got != expected:
                    raise DataError(f"{self.place(key)} ended after {got} of {expected} bytes")
                os.fsync(part.number)
                copy.parent.mkdir(parents=True, exist_ok=True)
                part.path.replace(copy)
        return copy


@contextmanager
def _writing(folder: str, place: str) -> Generator[Draft]:
    """A new file to write; removed at the end unless it has got another name.

    Whatever is wrong with the folder is a DataError, and never NotThere: the file may well be.
    """
    try:
        with drafting(Path(folder) / "parts", "copy") as part:
            yield part
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{place} cannot be copied to {folder}: {reason}") from None
