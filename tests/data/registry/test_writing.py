"""New entries in a Data.toml: what is there stays, and nobody sees half a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import DataError, RegistryError, UsageError
from manyhands.data import writing
from manyhands.data.project import read_project
from manyhands.data.registry import dataset
from manyhands.data.writing import register, render

from .conftest import patient


def test_a_file_is_made_and_added_to(folder, tmp_path):
    entry = register("one", folder, description='with "quotes"')
    assert entry.file == str(tmp_path / "here" / "Data.toml")
    assert dataset("one").description == 'with "quotes"'
    assert "d.txt" in dataset("one").open()
    file = tmp_path / "here" / "Data.toml"
    file.chmod(0o640)
    file.write_text(file.read_text() + "# a comment, and no line end")
    before = file.read_text()
    register("two/b", "@__DIR__/../content", tags=["x"], classes=10)
    assert file.read_text().startswith(before)
    assert file.stat().st_mode & 0o777 == 0o640
    assert dataset("two/b").open().keys() == dataset("one").open().keys()
    assert (dataset("two/b").conf["tags"], dataset("two/b").conf["classes"]) == (["x"], 10)
    register("three", "memory://x", file=tmp_path / "home")
    assert dataset("three", project=tmp_path / "home").storage["url"] == "memory://x"
    storage = {"driver": "S3", "bucket": "b", "cache": {"folder": "/c"}, "anon": True}
    register("four", storage)
    assert dataset("four").storage == storage
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["Data.toml"]


def test_a_link_stays_a_link(tmp_path, folder):
    register("one", folder, file=tmp_path / "real.toml")
    (tmp_path / "here" / "Data.toml").symlink_to(tmp_path / "real.toml")
    register("two", folder)
    assert (tmp_path / "here" / "Data.toml").is_symlink()
    assert set(read_project(tmp_path / "real.toml").entries) == {"one", "two"}


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("one", "/x", "has an entry 'one' already"),
        ("a b", "/x", "name: 'a b' is not made of"),
        ("x", "", "storage.path: is empty"),
        ("x", {"driver": "S3"}, "storage.bucket: is missing"),
        ("x", {"driver": "Nonsense"}, "storage.driver: expected one of"),
        ("x", "ftp://user:pass@host/", "looks like a secret"),
        ("x", {"driver": "S3", "bucket": "b", "key": "x"}, "looks like a secret"),
        ("x", {"driver": "FileSystem", "path": object()}, "cannot be written"),
        ("x", {"driver": "FileSystem", "path": "\ud800"}, "UTF-8"),
    ],
)
def test_what_is_wrong_leaves_the_file_as_it_was(tmp_path, name, place, said):
    register("one", "/data")
    file = tmp_path / "here" / "Data.toml"
    before = file.read_bytes()
    with pytest.raises(UsageError, match=said):
        register(name, place)
    assert file.read_bytes() == before
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["Data.toml"]


def test_files_that_nothing_can_be_appended_to(tmp_path):
    file = tmp_path / "here" / "Data.toml"
    file.write_text("data_config_version = 1\ndatasets = []\n")
    with pytest.raises(RegistryError, match="nothing can be appended"):
        register("one", "/data")
    file.write_text("broken = [")
    with pytest.raises(RegistryError, match="not valid TOML"):
        register("one", "/data")
    with pytest.raises(DataError, match="cannot be written"):
        register("one", "/data", file=file / "below" / "Data.toml")


def test_a_nan_is_what_it_was(tmp_path):
    file = tmp_path / "Data.toml"
    register("one", "/data", file=file, missing=float("nan"))
    register("two", "/data", file=file)
    assert set(read_project(file).entries) == {"one", "two"}


def test_writers_take_turns(tmp_path):
    code = """
import sys
from manyhands.data.writing import register
for number in range(5):
    register(f"{sys.argv[1]}-{number}", "/data", file=sys.argv[2])
"""
    file = tmp_path / "shared" / "Data.toml"
    register("first", "/data", file=file)
    # Long enough to be met half written, by somebody who reads all the while.
    file.write_text(f"# {'x' * (1 << 20)}\n{file.read_text()}")
    seen, ends = {"first"}, []
    with ExitStack() as stack:
        commands = [[sys.executable, "-c", code, name, str(file)] for name in "abcd"]
        writers = [stack.enter_context(subprocess.Popen(command)) for command in commands]
        while len(ends) < len(writers):
            ends = [writer.poll() for writer in writers if writer.poll() is not None]
            there = set(read_project(file).entries)
            assert seen <= there
            seen = there
    assert ends == [0, 0, 0, 0]
    assert seen == {"first"} | {f"{name}-{number}" for name in "abcd" for number in range(5)}


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path):
    code = """
import os, sys
from manyhands.data.writing import register
def replace(*_):
    print("written", flush=True)
    sys.stdin.read()  # until it is killed
os.replace = replace
register("two", "/data", file=sys.argv[1])
"""
    file = tmp_path / "shared" / "Data.toml"
    register("one", "/data", file=file)
    before = file.read_bytes()
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"written\n"
        writer.kill()
    assert file.read_bytes() == before
    assert len(list(file.parent.iterdir())) == 2  # and what it has written
    register("three", "/data", file=file)
    assert set(read_project(file).entries) == {"one", "three"}
    assert list(file.parent.iterdir()) == [file]


def test_a_turn_that_does_not_end_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "TURN_S", 0.05)
    with (
        writing._turn(tmp_path / "here"),
        pytest.raises(DataError, match=r"another process has been writing in .*here for 0\.05 s"),
    ):
        register("one", "/data")


def test_an_editor_takes_no_turns(tmp_path, monkeypatch):
    """What somebody saved while we were at work is not lost."""
    file = tmp_path / "here" / "Data.toml"
    register("one", "/data")
    edits = iter(["# an edit\n"])
    checked = writing._checked

    def and_meanwhile(*arguments):
        if edit := next(edits, ""):
            file.write_text(edit + file.read_text())
        return checked(*arguments)

    monkeypatch.setattr(writing, "_checked", and_meanwhile)
    register("two", "/data")
    assert file.read_text().startswith("# an edit\n")
    assert set(read_project(file).entries) == {"one", "two"}


LEAVES = st.one_of(
    st.text(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
)
TABLES = st.recursive(
    st.dictionaries(st.text(), LEAVES, max_size=3),
    lambda inner: st.dictionaries(
        st.text(), st.one_of(LEAVES, inner, st.lists(st.one_of(LEAVES, inner))), max_size=3
    ),
    max_leaves=10,
)


@patient
@given(TABLES)
def test_what_is_written_is_what_is_read(table):
    text = "[[datasets]]\n" + render(table)
    assert tomllib.loads(text)["datasets"] == [table]


def test_new_files_have_the_rights_that_others_have(tmp_path):
    (tmp_path / "plain").touch()
    register("one", "/data")
    ours = os.stat(tmp_path / "here" / "Data.toml").st_mode
    assert ours == os.stat(tmp_path / "plain").st_mode
