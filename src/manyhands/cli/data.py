"""`manyhands data`: the data sets of Data.toml files: list, show, check, add, and split a JSONL."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from manyhands.core.errors import ManyhandsError, RegistryError
from manyhands.data import chunks
from manyhands.data.blobs import Blob
from manyhands.data.project import FILE_NAME, Project, read_project
from manyhands.data.registry import DataSet, Place, dataset, load_project, of_entry, search_path
from manyhands.data.secret import hide
from manyhands.data.writing import register

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PATIENCE_S = 5.0
"""After which a place that has not answered yet is named."""

AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
File = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="PATH",
        help=f"This {FILE_NAME}, or the one in this folder. (default: those of "
        "$MANYHANDS_DATA_PATH, $JULIA_DATASETS_PATH; else of the working directory and the user)",
    ),
]


@app.callback()
def data() -> None:
    """Data sets by name, as Data.toml files have them: list, show, check, add; split a JSONL."""


@app.command("list")
def list_data(file: File = None, json_output: AsJson = False) -> None:
    """The data sets that `manyhands.data.dataset` finds, and the files that they are from."""
    found, broken, missing = _found(file)
    if broken:
        raise _together(broken)
    for path in missing:
        print(f"warning: {path} is not there", file=sys.stderr)
    if json_output:
        print(json.dumps([_plain(one) for one in found], indent=2))
        return
    if not found:
        looked = [str(place.file) for place in search_path()] if file is None else [file]
        print(f"no data sets; looked for: {', '.join(looked)}")
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        print(f"{one.name:<{width}}  {_kind(one):<8}  {one.storage['driver']}  {one.file}")


@app.command("show")
def show_data(
    spec: Annotated[str, typer.Argument(help="NAME, or NAME#SUB/PATH for what is there.")],
    file: File = None,
    json_output: AsJson = False,
) -> None:
    """What is known of a data set, and what is in it, or in a folder of it."""
    found = dataset(spec, project=file)
    there: dict[str, Any] = {}
    failed = None
    try:
        with _patience(found.name):
            there = _there(found)
    except ManyhandsError as error:
        failed = error
    if json_output:
        problem = None if failed is None else str(failed)
        plain = {**_plain(found), "conf": _shown(found.conf), **there, "problem": problem}
        print(json.dumps(plain, indent=2))
    else:
        _say("\n".join(_description(found, there)))
    if failed is not None:
        raise failed


@app.command("check")
def check_data(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Only these. (default: all)")
    ] = None,
    file: File = None,
    json_output: AsJson = False,
) -> None:
    """Open every data set, and report all that is wrong. Exit code 1: something is."""
    found, broken, missing = _found(file)
    lost = [f"{path} is not there" for path in missing]
    results: list[dict[str, Any]] = []
    for result in _results(found, [*map(str, broken), *lost], set(names or [])):
        results.append(result)
        if not json_output:  # at once: the next one may take its time
            _say("\n".join(_lines(result)))
    bad = sum(not result["ok"] for result in results)
    if json_output:
        print(json.dumps({"problems": bad, "datasets": results}, indent=2))
    else:
        print(f"{len(results) - bad} of {len(results)} can be used")
    raise typer.Exit(1 if bad else 0)


@app.command("add")
def add_data(
    name: Annotated[str, typer.Argument(help="What it will be called.")],
    place: Annotated[str, typer.Argument(help="A file, a folder, or a URL that fsspec knows.")],
    file: Annotated[
        str, typer.Option("--file", metavar="PATH", help=f"The {FILE_NAME} to write to.")
    ] = FILE_NAME,
    description: Annotated[str, typer.Option(help="A line about it.")] = "",
    json_output: AsJson = False,
) -> None:
    """Write a new data set into a Data.toml, which is made if it is not there."""
    entry = register(name, place, file=file, description=description)
    if json_output:
        print(json.dumps({"name": entry.name, "uuid": entry.uuid, "file": entry.file}))
        return
    print(f"{entry.name}: added to {entry.file}")


@app.command("split")
def split_data(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A JSONL file.")],
    num: Annotated[int, typer.Argument(metavar="N", help="How many chunks.", min=1)],
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where they go. (default: beside FILE)")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Deal the lines of a JSONL file into N files, line i to file i % N.

    Blank lines do not count. The same file gives the same chunks; those of an earlier time are
    replaced. A line that is no JSON is an error, and nothing is written.
    """
    made = chunks.split(source, num, folder)
    if json_output:
        print(json.dumps([{"file": str(path), "lines": lines} for path, lines in made.items()]))
        return
    for path, lines in made.items():
        print(f"{path}: {lines} line{'' if lines == 1 else 's'}")


def _found(file: str | None) -> tuple[list[DataSet], list[RegistryError], list[Path]]:
    """Every data set that is found by its name; the files that are broken; those not there."""
    found: dict[str, DataSet] = {}
    broken: list[RegistryError] = []
    missing: list[Path] = []
    for place in search_path() if file is None else [Place(Path(file), named=True)]:
        try:
            project = read_project(place.file) if file is None else load_project(file)
        except RegistryError as error:
            broken.append(error)
            continue
        if project is None and place.named:
            missing.append(place.file)
        for one in _datasets(project):
            found.setdefault(one.name, one)
    return list(found.values()), broken, missing


def _datasets(project: Project | None) -> Iterator[DataSet]:
    if project is not None:
        for entry in project.entries.values():
            yield of_entry(entry, project)


def _say(text: str) -> None:
    """Names of files need not be text; what is none is shown as question marks."""
    print(text.encode(errors="replace").decode(), flush=True)


def _together(errors: list[RegistryError]) -> RegistryError:
    lines = [line for error in errors for line in error.message.splitlines()]
    return RegistryError(lines[0], [line.strip() for line in lines[1:]], hint=errors[0].hint)


def _results(
    found: list[DataSet], problems: list[str], wanted: set[str]
) -> Iterator[dict[str, Any]]:
    for problem in problems:
        yield {"name": None, "file": None, "ok": False, "problem": problem}
    for one in found:
        if not wanted or one.name in wanted:
            yield _result(one)
    for name in sorted(wanted - {one.name for one in found}):
        yield {"name": name, "file": None, "ok": False, "problem": "there is no such data set"}


def _result(found: DataSet) -> dict[str, Any]:
    problem = None
    try:
        with _patience(found.name):
            touch(found)
    except ManyhandsError as error:
        problem = str(error)
    return {"name": found.name, "file": found.file, "ok": problem is None, "problem": problem}


@contextmanager
def _patience(name: str) -> Generator[None]:
    """Say what is waited for, if it takes long: file systems behind URLs try for minutes."""
    told = threading.Timer(PATIENCE_S, lambda: note(f"{name}: no answer yet (Ctrl-C ends it)"))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()
        told.join()


def note(text: str) -> None:
    """On stderr, beside what was asked for."""
    print(text, file=sys.stderr, flush=True)


def touch(found: DataSet) -> None:
    """Read a little: what is there may still be closed to this user."""
    opened = found.open(cached=False)
    if isinstance(opened, Blob):
        with opened.open("rb") as file:
            file.read(1)
    else:
        opened.keys()


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    name = result["name"] or FILE_NAME
    if result["ok"]:
        yield f"ok       {name}"
        return
    first, *rest = str(result["problem"]).splitlines()
    yield f"problem  {name}: {first}"
    yield from (f"         {line}" for line in rest)


def _there(found: DataSet) -> dict[str, Any]:
    opened = found.open(cached=False)
    if isinstance(opened, Blob):
        return {"place": str(opened), "bytes": opened.size}
    return {"place": str(opened), "entries": opened.store.entries(opened.key)}


def _description(found: DataSet, there: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found.name}  {found.uuid}"
    if found.description:
        yield found.description
    yield f"file    {found.file}"
    yield f"driver  {found.storage['driver']}"
    if "place" in there:
        yield f"place   {there['place']}"
    if "bytes" in there:
        yield f"size    {there['bytes']} bytes"
    for name, kind in there.get("entries", {}).items():
        yield f"  {name}{'/' * (kind == 'folder')}"


def _plain(found: DataSet) -> dict[str, Any]:
    return {
        "name": found.name,
        "uuid": found.uuid,
        "description": found.description,
        "driver": found.storage["driver"],
        "type": found.storage.get("type"),
        "file": found.file,
    }


def _kind(found: DataSet) -> str:
    return str(found.storage.get("type", "-"))


def _shown(conf: Mapping[str, object]) -> dict[str, object]:
    """The entry as it may be shown: without secrets, and without the data that stand in it."""
    plain = cast("dict[str, Any]", json.loads(json.dumps(conf, default=str)))
    storage = plain.pop("storage")
    if storage.get("driver") == "TomlDataStorage":
        storage.pop("data", None)
    return {**hide(plain, beside=True), "storage": hide(storage)}
