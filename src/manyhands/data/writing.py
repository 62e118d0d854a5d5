"""Writing: a new entry in a Data.toml.

The entry is appended and all else stays as it was, comments too. Writers take turns by a lock on
the folder; readers see the old file or the new one, whatever happens meanwhile. What a writer that
was killed has left, the next one clears.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from manyhands.core.errors import DataError, RegistryError, UsageError
from manyhands.data.drafts import drafting
from manyhands.data.drivers import open_storage
from manyhands.data.project import FILE_NAME, VERSION, Entry, Project, parse_project
from manyhands.data.stores import is_url

TURN_S = 10.0
"""How long another writer of the same folder is waited for; a turn takes milliseconds."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def register(
    name: str,
    place: str | os.PathLike[str] | Mapping[str, object],
    *,
    file: str | os.PathLike[str] = FILE_NAME,
    description: str = "",
    **more: object,
) -> Entry:
    """Add an entry to a Data.toml, which is made if it is not there; returns the entry.

    `place` is a path, an fsspec URL, or a whole `storage` table; a path without '/' at its
    beginning is taken from the working directory, unless it begins with @__DIR__. `more` are
    further keys of the entry. Raises RegistryError and leaves the file as it was if the name is
    taken or anything is wrong with it, DataError if it cannot be written.
    """
    target = Path(os.path.expanduser(file))
    target = (target / FILE_NAME if os.path.isdir(target) else target).resolve()
    table: dict[str, object] = {"name": name, "uuid": str(uuid.uuid4())}
    if description:
        table["description"] = description
    table |= more
    table["storage"] = dict(place) if isinstance(place, Mapping) else _storage(place)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _turn(target.parent):
            return _append(target, name, table)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}") from None


def _storage(place: str | os.PathLike[str]) -> dict[str, object]:
    text = os.fspath(place)
    if isinstance(place, str) and is_url(text):
        return {"driver": "fsspec", "url": text}
    if text and not text.startswith("@__DIR__"):
        text = os.path.abspath(os.path.expanduser(text))
    return {"driver": "FileSystem", "path": text}


def _append(target: Path, name: str, table: Mapping[str, object]) -> Entry:
    while True:
        old = _read(target)
        start = f"data_config_version = {VERSION}\n" if old is None else old
        before = parse_project(start, target) if old is not None else None
        if before is not None and name in before.entries:
            raise RegistryError(
                f"{target} has an entry {name!r} already",
                hint="take another name, or edit the file",
            )
        end = "" if start.endswith("\n") else "\n"
        text = f"{start}{end}\n[[datasets]]\n{render(table)}"
        after = _checked(text, target, before)
        entry = after.entries[name]
        open_storage(entry.storage, f"{target}: {name!r}", packages=after.drivers)
        if _read(target) == old:  # an editor takes no turns
            _replace(target, text)
            return entry


def _read(target: Path) -> str | None:
    try:
        return target.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise RegistryError(f"{target} is not UTF-8") from None


def _checked(text: str, target: Path, before: Project | None) -> Project:
    """The project of the new text, if it has what was there, and one entry more."""
    try:
        after = parse_project(text, target)
    except RegistryError as error:
        if "is not valid TOML" not in error.message:
            raise
        # Tables of a list that was written as `datasets = [...]` cannot be appended to.
        after = None
    kept = _texts(before)
    if after is None or {key: _texts(after).get(key) for key in kept} != kept:
        raise RegistryError(
            f"nothing can be appended to {target}",
            hint="write its entries as [[datasets]], with nothing of another table after them",
        )
    return after


def _texts(project: Project | None) -> dict[str, str]:
    """What entries say, as texts: in those a nan is equal to itself."""
    if project is None:
        return {}
    return {name: repr(entry.conf) for name, entry in project.entries.items()}


def _replace(target: Path, text: str) -> None:
    rights = target.stat().st_mode & 0o777 if target.exists() else None
    # Never more than the file will have; its owner's own, for whoever has to clear it after a kill.
    mode = 0o666 if rights is None else rights | 0o600
    with drafting(target.parent, target.name, mode) as draft:
        with open(draft.number, "w", encoding="utf-8", newline="", closefd=False) as file:
            file.write(text)
        os.fsync(draft.number)
        if rights is not None:
            os.fchmod(draft.number, rights)
        os.replace(draft.path, target)


@contextmanager
def _turn(folder: Path) -> Generator[None]:
    """The right to write in this folder; the kernel ends it with the process."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + TURN_S
    try:
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"another process has been writing in {folder} for {TURN_S:g} s",
                        hint="end it, then try again",
                    ) from None
                time.sleep(0.01)  # the kernel has no wait for a lock that ends
        yield
    finally:
        os.close(number)


def render(table: Mapping[str, object], above: str = "datasets.") -> str:
    """A table of an entry as TOML: its values, then the tables in it. Raises UsageError."""
    lines: list[str] = []
    for key, value in table.items():
        if not isinstance(value, Mapping):
            lines.append(f"{_key(key)} = {_value(value, key)}\n")
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner = render(cast("Mapping[str, object]", value), f"{above}{_key(key)}.")
            lines.append(f"\n[{above}{_key(key)}]\n{inner}")
    return "".join(lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: object, key: str) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return _text(value)
        case list() | tuple():
            items = cast("Sequence[Any]", value)
            return f"[{', '.join(_value(item, key) for item in items)}]"
        case Mapping():
            table = cast("Mapping[str, object]", value)
            return f"{{{', '.join(f'{_key(k)} = {_value(v, k)}' for k, v in table.items())}}}"
        case _:
            raise UsageError(
                f"{key}: a {type(value).__name__} cannot be written to a {FILE_NAME}",
                hint="texts, numbers, true and false, lists and tables can",
            )


def _text(text: str) -> str:
    """In quotes; what TOML does not allow in them is escaped."""
    made = text.replace("\\", "\\\\").replace('"', '\\"')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text[:80]!r} is not text that UTF-8 can hold") from None
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda c: f"\\u{ord(c[0]):04x}", made) + '"'
