"""Registry: data sets by name, from the Data.toml files that are searched.

    MANYHANDS_DATA_PATH, then JULIA_DATASETS_PATH: places with ':' between them. A place is a
    Data.toml, or a folder that has one; '@' is the working directory (not those above it), and
    '' the user's own: manyhands/Data.toml in $XDG_CONFIG_HOME or ~/.config, then
    ~/.julia/datasets/Data.toml. With neither variable, '@' and then ''.

The first file that has the name wins. Files are read anew at every call, so a change counts at
once; one that is not there is empty.
"""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from manyhands.core.errors import DataError, RegistryError, UsageError
from manyhands.data.blobs import Blob, BlobTree, root_of
from manyhands.data.drivers import open_storage
from manyhands.data.project import (
    EXAMPLE,
    FILE_NAME,
    Entry,
    Project,
    make_project,
    read_project,
)
from manyhands.data.spec import Spec, parse_spec
from manyhands.data.stores import is_url

_VARIABLES = ("MANYHANDS_DATA_PATH", "JULIA_DATASETS_PATH")

ProjectLike = str | os.PathLike[str] | Mapping[str, object] | Project
"""A Data.toml or its folder; what one holds, as a dict; or one that was read."""


class Place(NamedTuple):
    """A Data.toml that is searched."""

    file: Path
    named: bool
    """Whether the user named it: then it should be there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """What is known of a data set; `open` gives the data. Can be pickled."""

    name: str
    uuid: str
    description: str
    storage: Mapping[str, object] = field(repr=False)
    conf: Mapping[str, object] = field(repr=False)
    """The whole entry, with whatever else it has."""
    query: Mapping[str, str]
    """What stood behind '?'."""
    fragment: str
    """The place inside the data set, behind '#'."""
    file: str
    """The Data.toml that it is from, or what it was given by."""
    packages: Mapping[str, str] = field(repr=False)
    given: bool = False
    """Whether the place is the user's own, by `path`, and from no Data.toml."""

    def open(self, *, cached: bool = True) -> BlobTree | Blob:
        """The files of it: a tree or a single one, as `storage.type` says, or what is there.

        Also good for `with`, but holds nothing open. With `cached=False` a cache is left alone.
        Raises RegistryError, DataError, NotThere.
        """
        source = f"{self.file}: {self.name!r}"
        storage = open_storage(
            self.storage, source, packages=self.packages, cached=cached, trusted=self.given
        )
        try:
            root = root_of(storage.store)
        except DataError as error:
            hint = error.hint or self._hint()
            raise type(error)(f"{source}: {error.message}", hint=hint) from None
        kind = "file" if isinstance(root, Blob) else "folder"
        if storage.kind not in (None, kind):
            raise UsageError(f"{source}: expected a {storage.kind}, and {root} is a {kind}")
        if not self.fragment:
            return root
        if isinstance(root, Blob):
            raise UsageError(f"{source} is a single file: nothing is at {self.fragment!r} in it")
        return root[self.fragment]

    def _hint(self) -> str | None:
        path = self.storage.get("path")
        if not isinstance(path, str) or os.path.isabs(os.path.expanduser(path)):
            return None
        return (
            "paths that begin with no '/' are taken from the working directory; for the folder "
            f"of the {FILE_NAME} write @__DIR__/{path}"
        )


def dataset(
    spec: str,
    *,
    path: str | os.PathLike[str] | None = None,
    project: ProjectLike | None = None,
) -> DataSet:
    """The data set of this name: `name`, `name#sub/path` or `name?key=value#sub/path`.

    With `path` (a path or any fsspec URL) the data are there, and no Data.toml is looked at. With
    `project` that one is looked at and no other. Raises UsageError.
    """
    parsed = parse_spec(spec)
    if path is not None:
        if project is not None:
            raise UsageError("path and project contradict each other", hint="give one of them")
        return _given(parsed, path)
    if project is None:
        return find(parsed, (read for _, read in search()))
    return find(parsed, [load_project(project)])


def load_project(project: ProjectLike) -> Project:
    """A Data.toml, by its path, its folder or as a dict. Raises RegistryError."""
    if isinstance(project, Project):
        return project
    if isinstance(project, Mapping):
        return make_project(project)
    file = _in_folder(Path(os.path.expanduser(project)))
    read = read_project(file)
    if read is None:
        raise RegistryError(f"{file} is not there", hint=f"an example is {EXAMPLE}")
    return read


def search() -> Iterator[tuple[Place, Project | None]]:
    """The files that are searched, in order, with what they say. Raises RegistryError."""
    for place in search_path():
        yield place, read_project(place.file)


def search_path(
    environ: Mapping[str, str] | None = None, here: Path | None = None, home: Path | None = None
) -> list[Place]:
    """The files that are searched, in order, each once; they need not be there."""
    environ = os.environ if environ is None else environ
    here = Path.cwd() if here is None else here
    home = Path(os.path.expanduser("~")) if home is None else home
    given = [environ[name] for name in _VARIABLES if name in environ]
    words = [word for text in given if text for word in text.split(os.pathsep)]
    own = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "manyhands" / FILE_NAME
    files: dict[Path, bool] = {}
    for word in words if given else ("@", ""):
        if word == "@":
            files.setdefault(here / FILE_NAME, False)
        elif word == "":
            files.setdefault(own, False)
            files.setdefault(home / ".julia" / "datasets" / FILE_NAME, False)
        else:
            files[_in_folder(here / os.path.expanduser(word))] = True
    return [Place(file, named) for file, named in files.items()]


def find(spec: Spec, projects: Iterable[Project | None]) -> DataSet:
    """The data set of the first project that has its name; no further one is asked for.

    Raises UsageError.
    """
    there: list[Project] = []
    for project in projects:
        if project is None:
            continue
        if (entry := project.entries.get(spec.name)) is not None:
            return of_entry(entry, project, spec)
        there.append(project)
    names = sorted({name for project in there for name in project.entries})
    near = difflib.get_close_matches(spec.name, names, n=3)
    looked = ", ".join(project.file for project in there) or f"no {FILE_NAME} was found"
    raise UsageError(
        f"there is no data set {spec.name!r} (looked in: {looked})",
        hint=f"did you mean {' or '.join(near)}?"
        if near
        else f"give a place, dataset({spec.name!r}, path=...), or an entry in {FILE_NAME} "
        f"(manyhands data add {spec.name} PATH); an example is {EXAMPLE}",
    )


def of_entry(entry: Entry, project: Project, spec: Spec | None = None) -> DataSet:
    """The data set of an entry."""
    return DataSet(
        name=entry.name,
        uuid=entry.uuid,
        description=entry.description,
        storage=entry.storage,
        conf=entry.conf,
        query={} if spec is None else spec.query,
        fragment="" if spec is None else spec.fragment,
        file=entry.file,
        packages=project.drivers,
    )


def _given(spec: Spec, path: str | os.PathLike[str]) -> DataSet:
    place = os.fspath(path)
    storage: dict[str, object]
    if isinstance(path, str) and is_url(place):
        storage = {"driver": "fsspec", "url": place}
    else:
        place = os.path.abspath(os.path.expanduser(place)) if place else place
        storage = {"driver": "FileSystem", "path": place}
    # The same place is the same data set, in every process.
    known = str(uuid.uuid5(uuid.NAMESPACE_URL, place))
    return DataSet(
        name=spec.name,
        uuid=known,
        description="",
        storage=storage,
        conf={"name": spec.name, "uuid": known, "storage": storage},
        query=spec.query,
        fragment=spec.fragment,
        file="path=",
        packages={},
        given=True,
    )


def _in_folder(path: Path) -> Path:
    return path / FILE_NAME if os.path.isdir(path) else path
