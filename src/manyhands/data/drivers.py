"""Drivers: from the `storage` table of an entry to the store that it means.

    FileSystem        path
    TomlDataStorage   data: base64, or tables of it
    S3                bucket, prefix, region, profile, endpoint_url, anon
    JuliaHubDataRepo  the same, as JuliaHub calls them: bucket_region, aws_profile
    fsspec            url, options

Each may say `type`, Blob or BlobTree (or File, FileTree, as DataSets.jl will call them), and have
a `cache`: true, or a table with a `folder`. Nothing is touched here.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from manyhands.core.errors import RegistryError, UsageError
from manyhands.data.cache import CachedStore
from manyhands.data.spec import parts_of
from manyhands.data.stores import Embedded, Kind, Store, TomlStore, UrlStore, is_url, store_at

_T = TypeVar("_T")
_KINDS: Mapping[str, Kind] = {
    "Blob": "file",
    "File": "file",
    "BlobTree": "folder",
    "FileTree": "folder",
}
_CACHES = "its options say where files of any name are written; cache = true keeps copies, too"
# File systems that do more than read, as somebody else's file may tell them to. The user's own code
# may: it could do the same without us.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("simplecache", "filecache", "blockcache", "cached"), _CACHES),
    "reference": "it evaluates what it reads",
    "dask": "it runs what it is given elsewhere",
}
_NAMES: Mapping[type, str] = {
    str: "text in quotes",
    bool: "true or false",
    dict: "a table",
}


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the data of an entry lie, and what they are, if the entry says so."""

    store: Store
    kind: Kind | None


def open_storage(
    storage: Mapping[str, object],
    source: str,
    *,
    packages: Mapping[str, str] | None = None,
    cached: bool = True,
    trusted: bool = False,
) -> Storage:
    """The store of a `storage` table; `source` names its file and entry. Touches nothing.

    `packages` are the Julia packages of drivers that the file asks for. With `cached=False` a
    cache is checked but not used. `trusted` is what the user's own code says, not a file: it may
    name any file system. Raises RegistryError with everything that is wrong.
    """
    fields = Fields(storage, source, trusted=trusted)
    name = fields.need("driver", str)
    kind = fields.choice("type", _KINDS)
    cache = _cache_folder(fields)
    driver = DRIVERS.get(name or "")
    store = None if driver is None else driver(fields)
    if name and driver is None:
        fields.problem("driver", _unknown(name, packages or {}))
    fields.finish()
    assert store is not None
    if cached and cache is not None:
        store = CachedStore(store, cache)
    return Storage(store, kind)


class Fields:
    """The fields of a `storage` table; collects what is wrong with them."""

    def __init__(
        self,
        table: Mapping[str, object],
        source: str,
        above: str = "storage.",
        *,
        trusted: bool = False,
    ) -> None:
        self.source, self.trusted = source, trusted
        self.problems: list[str] = []
        self._table, self._above = table, above

    def problem(self, key: str, text: str) -> None:
        """Something is wrong with this field."""
        self.problems.append(f"{self._above}{key}: {text}")

    def need(self, key: str, kind: type[_T]) -> _T | None:
        """A field that must be there; else None, and a problem."""
        if self._table.get(key) is None:
            self.problem(key, f"is missing ({_NAMES[kind]})")
        value = self.may(key, kind)
        if value == "":
            self.problem(key, "is empty")
        return value

    def may(self, key: str, kind: type[_T]) -> _T | None:
        """A field that need not be there; None without it, or with a problem."""
        value = self._table.get(key)
        if value is None or isinstance(value, kind):
            return value
        self.problem(key, f"expected {_NAMES[kind]}, got {repr(value)[:80]}")
        return None

    def get(self, key: str) -> object:
        """Whatever is there."""
        return self._table.get(key)

    def choice(self, key: str, choices: Mapping[str, _T]) -> _T | None:
        """What one of these words means; None without the field, or with a problem."""
        word = self.may(key, str)
        if word is None:
            return None
        if word not in choices:
            self.problem(key, f"expected one of {', '.join(choices)}, got {word[:80]!r}")
        return choices.get(word)

    def only(self, *known: str) -> None:
        """Any other field is a slip of the pen, in the tables that are ours."""
        for key in self._table:
            if key not in known:
                self.problem(key, f"is not known; there are {', '.join(known)}")

    def finish(self) -> None:
        """Raise RegistryError if anything was wrong."""
        if self.problems:
            raise RegistryError(f"{self.source} cannot be opened:", self.problems)


def _file_system(fields: Fields) -> Store | None:
    path = fields.need("path", str)
    if not path:
        return None
    try:
        return store_at(Path(path))
    except UsageError as error:
        fields.problem("path", error.message)
        return None


def _toml(fields: Fields) -> Store | None:
    data = fields.get("data")
    if data is None:
        fields.problem("data", "is missing (base64 text, or a table of files)")
        return None
    kind = fields.choice("type", _KINDS) if not fields.problems else None
    if kind is not None and isinstance(data, str) != (kind == "file"):
        expected = "base64 text" if kind == "file" else "a table of files"
        fields.problem("data", f"expected {expected}, as type says")
        return None
    found = _embedded(fields, "data", data)
    return None if found is None else TomlStore(fields.source, found)


def _embedded(fields: Fields, field: str, data: object) -> Embedded | bytes | None:
    if isinstance(data, str):
        try:
            return base64.b64decode("".join(data.split()), validate=True)
        except (binascii.Error, ValueError):
            fields.problem(field, "is not base64")
            return None
    if not isinstance(data, dict):
        fields.problem(field, f"expected base64 text or a table, got {repr(data)[:80]}")
        return None
    found: dict[str, Embedded | bytes] = {}
    for name, value in cast("dict[str, object]", data).items():
        if not _is_file_name(name):
            fields.problem(field, f"{name[:80]!r} is no name of a file or folder")
            continue
        below = _embedded(fields, f"{field}.{name}", value)
        if below is not None:
            found[name] = below
    return found


def _is_file_name(name: str) -> bool:
    try:
        return parts_of(name) == (name,)
    except UsageError:
        return False


def _s3(fields: Fields) -> Store | None:
    known = ("bucket", "prefix", "region", "profile", "endpoint_url", "anon")
    fields.only("driver", "type", "cache", *known)
    store = _bucket(fields, region="region", profile="profile")
    anon = fields.may("anon", bool)
    endpoint = fields.may("endpoint_url", str)
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        fields.problem("endpoint_url", f"expected http(s)://..., got {endpoint[:80]!r}")
    if anon and fields.get("profile") is not None:
        fields.problem("anon", "and profile contradict each other: leave one out")
    if store is None:
        return None
    more = {"anon": anon, "endpoint_url": endpoint}
    given = {key: value for key, value in more.items() if value is not None}
    return UrlStore(store.url, {**store.options, **given}, store.protocol, store.path)


def _julia_hub(fields: Fields) -> Store | None:
    return _bucket(fields, region="bucket_region", profile="aws_profile")


def _bucket(fields: Fields, *, region: str, profile: str) -> UrlStore | None:
    bucket = fields.need("bucket", str)
    if bucket and ("/" in bucket or ":" in bucket or bucket.split() != [bucket]):
        fields.problem("bucket", f"{bucket[:80]!r} is no name of a bucket: no s3://, no '/'")
    prefix = (fields.may("prefix", str) or "").strip("/")
    options: dict[str, Any] = {}
    if (name := fields.may(profile, str)) is not None:
        options["profile"] = name
    if (place := fields.may(region, str)) is not None:
        options["client_kwargs"] = {"region_name": place}
    if not bucket:
        return None
    path = f"{bucket}/{prefix}" if prefix else bucket
    return UrlStore(f"s3://{path}", options, "s3", path)


def _fsspec(fields: Fields) -> Store | None:
    fields.only("driver", "type", "cache", "url", "options")
    url = fields.need("url", str)
    options = cast("dict[str, Any]", fields.may("options", dict) or {})
    if url and not is_url(url):
        fields.problem("url", f"{url[:80]!r} is no URL (driver = 'FileSystem' takes a path)")
    if not url:
        return None
    for name, scheme in _schemes({"url": url, "options": options}):
        if scheme in _REFUSED and not fields.trusted:
            fields.problem(
                name,
                f"{scheme} is not for a Data.toml: {_REFUSED[scheme]} (your own code may name it: "
                "dataset(NAME, path=URL))",
            )
    try:
        return store_at(url, options)
    except UsageError as error:
        fields.problem("options", error.message)
        return None


def _schemes(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The fields that say which file system to use, and which one. Options do too: one file system
    may be told to use another, by its name or by a URL.
    """
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _schemes(cast("Mapping[str, Any]", value), f"{name}.")
        elif isinstance(value, str) and (is_url(value) or key.endswith("protocol")):
            yield from ((name, part.partition("://")[0]) for part in value.split("::"))


Driver = Callable[[Fields], Store | None]
DRIVERS: Mapping[str, Driver] = {
    "FileSystem": _file_system,
    "TomlDataStorage": _toml,
    "S3": _s3,
    "JuliaHubDataRepo": _julia_hub,
    "fsspec": _fsspec,
}
"""By the name that `driver` has; None where there are problems."""


def _unknown(name: str, packages: Mapping[str, str]) -> str:
    if name in packages:
        return (
            f"{name[:80]!r} is in the Julia package {packages[name][:80]!r}, which Python cannot "
            f"load; there are {', '.join(DRIVERS)}"
        )
    return f"expected one of {', '.join(DRIVERS)}, got {name[:80]!r}"


def _cache_folder(fields: Fields) -> str | None:
    cache = fields.get("cache")
    if cache is None or cache is False:
        return None
    if cache is True:
        return default_cache()
    if not isinstance(cache, dict):
        fields.problem("cache", f"expected true or a table, got {repr(cache)[:80]}")
        return None
    table = Fields(cast("dict[str, object]", cache), fields.source, "storage.cache.")
    table.only("folder")
    folder = table.may("folder", str)
    fields.problems.extend(table.problems)
    return os.path.abspath(os.path.expanduser(folder)) if folder else default_cache()


def default_cache() -> str:
    """Where copies go if nothing else is said."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "manyhands", "data")
