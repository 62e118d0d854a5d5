"""Project: what one Data.toml says, checked as a whole. The format is that of DataSets.jl.

    data_config_version = 1

    [[datasets]]
    name = "imagenet"
    uuid = "..."
        [datasets.storage]
        driver = "FileSystem"
        type = "BlobTree"
        path = "@__DIR__/imagenet"

Whatever else an entry has is kept. What a storage needs is known to its driver and checked when
it is opened, so that one entry with a driver that is not here leaves the others usable.
"""

from __future__ import annotations

import logging
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from manyhands.core.errors import RegistryError
from manyhands.data import secret
from manyhands.data.drivers import DRIVERS
from manyhands.data.spec import name_problem

log = logging.getLogger(__name__)

_T = TypeVar("_T")
FILE_NAME = "Data.toml"
VERSION = 1
EXAMPLE = Path(__file__).with_name("example.toml")
"""Ships with the package; every driver once."""

_MOST_BYTES = 64 << 20
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_TYPES: Mapping[type, str] = {
    str: "text in quotes",
    int: "a whole number",
    dict: "a table",
    list: "a list",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One `[[datasets]]`, checked."""

    name: str
    uuid: str
    description: str
    storage: Mapping[str, object] = field(repr=False)
    conf: Mapping[str, object] = field(repr=False)
    """All of it, as it stands in the file."""
    file: str
    """Where it stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A Data.toml: its entries by name, in their order."""

    file: str
    version: int
    entries: Mapping[str, Entry]
    drivers: Mapping[str, str]
    """Storage drivers that it asks for, and the Julia packages that they are in."""


def read_project(file: Path) -> Project | None:
    """The Data.toml at this path; None if there is none. Raises RegistryError."""
    try:
        text = _read(file).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RegistryError:
        raise
    except OSError as error:
        raise RegistryError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RegistryError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError:  # no file system can be asked for it
        raise RegistryError(f"{str(file)[:80]!r} is no path") from None
    return parse_project(text, file)


def _read(file: Path) -> bytes:
    """All of a plain file. A pipe would be waited for, and some devices have no end."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise RegistryError(f"{file} is no plain file, but a pipe, a device or a socket")
    if found.st_size > _MOST_BYTES:
        raise RegistryError(
            f"{file} has {found.st_size} bytes, and {_MOST_BYTES} are the most that it may have",
            hint="data that large belong into a file or folder of their own: driver = FileSystem",
        )
    return file.read_bytes()


def parse_project(text: str, file: Path) -> Project:
    """What a Data.toml of this text says, if it lay at `file`. Raises RegistryError."""
    try:
        config = cast("dict[str, object]", tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # a number of 5000 digits is a ValueError
        raise RegistryError(f"{file} is not valid TOML: {str(error)[:300]}") from None
    try:
        filled = cast("dict[str, object]", _fill(config, str(file.absolute().parent)))
        return make_project(filled, str(file))
    except RecursionError:
        raise RegistryError(f"{file} has tables too deep in one another") from None


def make_project(config: Mapping[str, object], file: str = "data project") -> Project:
    """From what a Data.toml holds; `file` is its name in messages. Raises RegistryError."""
    check = _Check()
    version = check.take(config, "data_config_version", int, FILE_NAME)
    if version is not None and not 0 <= version <= VERSION:
        newer = " (newer than this release reads)" if version > VERSION else ""
        check.problems.append(f"data_config_version: expected 0 or 1, got {version}{newer}")
    own = {key: value for key, value in config.items() if key not in ("datasets", "drivers")}
    _refuse_secrets(check, own, "", beside=True)
    tables = cast("list[object]", check.take(config, "datasets", list, FILE_NAME) or [])
    entries: dict[str, Entry] = {}
    for number, table in enumerate(tables, start=1):
        entry = _entry(check, table, number, VERSION if version is None else version, file)
        if entry is None:
            continue
        if entry.name in entries:  # as in DataSets.jl
            log.warning("%s: %r is there twice, and the last one counts", file, entry.name)
        entries[entry.name] = entry
    drivers = _drivers(check, config)
    if check.problems:
        hint = secret.REMEDY if check.has_secrets else f"an example is {EXAMPLE}"
        many = f"{len(check.problems)} problem{'' if len(check.problems) == 1 else 's'}"
        raise RegistryError(f"{file} has {many}:", check.problems, hint=hint)
    return Project(file=file, version=version or 0, entries=entries, drivers=drivers)


class _Check:
    """Collects what is wrong, so that it is told all at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.has_secrets = False

    def take(self, table: Mapping[str, object], key: str, kind: type[_T], where: str) -> _T | None:
        """A field that must be there and of this type; else None, and a problem."""
        if key not in table:
            self.problems.append(f"{where}, {key}: is missing ({_TYPES[kind]})")
            return None
        return self.typed(table[key], key, kind, where)

    def typed(self, value: object, key: str, kind: type[_T], where: str) -> _T | None:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        shown = repr(value)[:80]
        for container in (dict, list):
            if isinstance(value, container):
                shown = _TYPES[container]
        self.problems.append(f"{where}, {key}: expected {_TYPES[kind]}, got {shown}")
        return None


def _entry(check: _Check, table: object, number: int, version: int, file: str) -> Entry | None:
    where = f"entry {number}"
    known = len(check.problems)
    if not isinstance(table, Mapping):
        check.problems.append(f"{where}: expected a table, [[datasets]], got {repr(table)[:80]}")
        return None
    conf = cast("Mapping[str, object]", table)
    if isinstance(conf.get("name"), str):
        where = f"{where} ({str(conf['name'])[:80]!r})"
    name = check.take(conf, "name", str, where)
    if name is not None and (wrong := name_problem(name, version)) is not None:
        check.problems.append(f"{where}, name: {wrong}")
    uuid = check.take(conf, "uuid", str, where)
    if uuid is not None and not _UUID.fullmatch(uuid):
        check.problems.append(f"{where}, uuid: {uuid[:80]!r} is no UUID (8-4-4-4-12 hex digits)")
    description = check.typed(conf.get("description", ""), "description", str, where)
    tags = cast("list[object]", check.typed(conf.get("tags", []), "tags", list, where) or [])
    for tag in tags:
        check.typed(tag, "tags", str, where)
    own = {key: value for key, value in conf.items() if key != "storage"}
    _refuse_secrets(check, own, f"{where}, ", beside=True)
    storage = cast("dict[str, object] | None", check.take(conf, "storage", dict, where))
    if storage is not None and check.take(storage, "driver", str, f"{where}, storage") is not None:
        # What is embedded are files, which may have any name; of others' drivers nobody knows.
        embeds = storage["driver"] == "TomlDataStorage" or storage["driver"] not in DRIVERS
        own = {key: value for key, value in storage.items() if not (embeds and key == "data")}
        _refuse_secrets(check, own, f"{where}, storage.", beside=False)
    if len(check.problems) > known:
        return None
    assert name is not None
    assert uuid is not None
    assert storage is not None
    return Entry(
        name=name,
        uuid=uuid,
        description=description or "",
        storage=storage,
        conf=conf,
        file=file,
    )


def _refuse_secrets(
    check: _Check, table: Mapping[str, object], where: str, *, beside: bool
) -> None:
    for found in secret.secret_fields(table, beside=beside):
        check.problems.append(f"{where}{found}: looks like a secret")
        check.has_secrets = True


def _drivers(check: _Check, config: Mapping[str, object]) -> dict[str, str]:
    drivers: dict[str, str] = {}
    listed = config.get("drivers", [])
    tables = cast("list[object]", check.typed(listed, "drivers", list, FILE_NAME) or [])
    for number, table in enumerate(tables, start=1):
        where = f"driver {number}"
        if not isinstance(table, Mapping):
            check.problems.append(f"{where}: expected a table, [[drivers]], got {repr(table)[:80]}")
            continue
        conf = cast("Mapping[str, object]", table)
        kind = check.take(conf, "type", str, where)
        name = check.take(conf, "name", str, where)
        module = cast("dict[str, object] | None", check.take(conf, "module", dict, where))
        package = None if module is None else check.take(module, "name", str, f"{where}, module")
        if module is not None:
            check.take(module, "uuid", str, f"{where}, module")
        if kind == "storage" and name is not None and package is not None:
            drivers[name] = package
    return drivers


def _fill(value: object, folder: str) -> object:
    """`@__DIR__` stands for the folder of the file, in any text."""
    if isinstance(value, str):
        return value.replace("@__DIR__", folder)
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return {key: _fill(item, folder) for key, item in table.items()}
    if isinstance(value, list):
        return [_fill(item, folder) for item in cast("list[object]", value)]
    return value
