"""Data sets by name: which file counts, what is told, paths given in code."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.core.errors import NotThere, RegistryError, UsageError
from manyhands.data.drivers import open_storage
from manyhands.data.project import EXAMPLE
from manyhands.data.registry import search_path
from manyhands.data.stores import UrlStore

from .conftest import CONTENT, config

ENTRY = """
[[datasets]]
name = "{name}"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"
description = "{description}"
    [datasets.storage]
    driver = "FileSystem"
    path = "@__DIR__/{path}"
"""


def write(file, *names, path="x"):
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = [ENTRY.format(name=name, description=file.parent.name, path=path) for name in names]
    file.write_text("data_config_version = 1\n" + "".join(entries))
    return file


def files(environ, here="/here", home="/home/me"):
    return [str(p.file) for p in search_path(environ, Path(here), Path(home))]


OWN = ["/home/me/.config/manyhands/Data.toml", "/home/me/.julia/datasets/Data.toml"]


def test_where_files_are_searched(tmp_path):
    assert files({}) == ["/here/Data.toml", *OWN]
    assert files({"XDG_CONFIG_HOME": "/c"})[1] == "/c/manyhands/Data.toml"
    assert files({"MANYHANDS_DATA_PATH": "a.toml:/b.toml"}) == ["/here/a.toml", "/b.toml"]
    assert files({"MANYHANDS_DATA_PATH": str(tmp_path)}) == [str(tmp_path / "Data.toml")]
    both = {"MANYHANDS_DATA_PATH": "/a", "JULIA_DATASETS_PATH": "@:/b:"}
    assert files(both) == ["/a", "/here/Data.toml", "/b", *OWN]
    assert files({"JULIA_DATASETS_PATH": ""}) == []
    assert files({"JULIA_DATASETS_PATH": ":@"}) == [*OWN, "/here/Data.toml"]
    assert files({"MANYHANDS_DATA_PATH": "/a:/a:@:@"}) == ["/a", "/here/Data.toml"]


def test_the_home_of_the_user_is_meant_by_a_tilde():
    home = os.path.expanduser("~")
    assert files({"MANYHANDS_DATA_PATH": "~/x.toml"}) == [f"{home}/x.toml"]


def test_the_first_file_that_has_the_name_wins(tmp_path, monkeypatch):
    first = write(tmp_path / "first" / "Data.toml", "both", "one")
    second = write(tmp_path / "second" / "Data.toml", "both", "two")
    path = f"{first.parent}:{tmp_path}/nothing:{second}"
    monkeypatch.setenv("MANYHANDS_DATA_PATH", path)
    found = {name: mh.data.dataset(name).description for name in ("both", "one", "two")}
    assert found == {"both": "first", "one": "first", "two": "second"}
    monkeypatch.setenv("MANYHANDS_DATA_PATH", str(second))
    monkeypatch.setenv("JULIA_DATASETS_PATH", str(first))
    assert mh.data.dataset("both").description == "second"
    assert mh.data.dataset("one").description == "first"


def test_the_working_directory_then_the_user(tmp_path):
    write(tmp_path / "home" / ".julia" / "datasets" / "Data.toml", "a", "b", "c")
    assert mh.data.dataset("a").description == "datasets"
    write(tmp_path / "home" / ".config" / "manyhands" / "Data.toml", "a", "b")
    assert mh.data.dataset("a").description == "manyhands"
    write(tmp_path / "here" / "Data.toml", "a")
    assert [mh.data.dataset(n).description for n in "abc"] == ["here", "manyhands", "datasets"]


def test_folders_above_are_not_searched(tmp_path, monkeypatch):
    write(tmp_path / "here" / "Data.toml", "a")
    (tmp_path / "here" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "here" / "below")
    with pytest.raises(UsageError, match="no data set 'a'"):
        mh.data.dataset("a")


def test_a_file_that_changes_is_read_again(tmp_path):
    file = tmp_path / "here" / "Data.toml"
    times = write(file, "a", path="x").stat()
    assert mh.data.dataset("a").storage["path"].endswith("/x")
    write(file, "a", path="y")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as fast as clocks are coarse
    assert mh.data.dataset("a").storage["path"].endswith("/y")
    file.unlink()
    with pytest.raises(UsageError):
        mh.data.dataset("a")


def test_a_name_that_is_not_there(tmp_path):
    with pytest.raises(UsageError) as caught:
        mh.data.dataset("imagenet")
    assert "no Data.toml was found" in str(caught.value)
    assert "path=" in caught.value.hint
    assert str(EXAMPLE) in caught.value.hint
    file = write(tmp_path / "here" / "Data.toml", "imagenet_local")
    with pytest.raises(UsageError, match="did you mean imagenet_local") as caught:
        mh.data.dataset("imagenet_lokal")
    assert str(file) in str(caught.value)


def test_a_broken_file_hides_nothing(tmp_path, monkeypatch):
    good = write(tmp_path / "good.toml", "a")
    (tmp_path / "bad.toml").write_text("datasets = 1\n")
    monkeypatch.setenv("MANYHANDS_DATA_PATH", f"{tmp_path}/bad.toml:{good}")
    with pytest.raises(RegistryError, match=r"bad\.toml has 2 problems"):
        mh.data.dataset("a")
    monkeypatch.setenv("MANYHANDS_DATA_PATH", f"{good}:{tmp_path}/bad.toml")
    assert mh.data.dataset("a").file == str(good)  # found before: the other is not needed
    with pytest.raises(RegistryError, match=r"bad\.toml"):
        mh.data.dataset("b")


def test_a_path_is_given_in_code(folder):
    (folder.parent / "here" / "Data.toml").write_text("broken = [")  # is not looked at
    found = mh.data.dataset("imagenet_local", path=str(folder))
    assert found.name == "imagenet_local"
    with found.open() as tree:
        assert tree["hello.txt"].read_text() == "Hello\n"
    assert mh.data.dataset("x#d/e", path=folder).open().keys() == ["empty"]
    assert mh.data.dataset("x", path=folder / "d.txt").open().size > 0
    assert mh.data.dataset("x", path=f"file://{folder}").open().keys() == tree.keys()
    assert mh.data.dataset("x", path=str(folder)).uuid == found.uuid
    with pytest.raises(NotThere, match=r"'x': .*nothing: there is no such file"):
        mh.data.dataset("x", path=folder / "nothing").open()
    with pytest.raises(UsageError, match="contradict"):
        mh.data.dataset("x", path=folder, project={})
    with pytest.raises(RegistryError, match=r"storage\.path: is empty"):
        mh.data.dataset("x", path="").open()


def test_a_url_in_code_may_name_any_file_system(folder, tmp_path, monkeypatch):
    """Also those that a Data.toml, which may be somebody else's, is not to choose."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where they have their copies
    for scheme in ("simplecache", "filecache"):
        url = f"{scheme}::file://{folder}"
        with pytest.raises(RegistryError, match=r"is not for a Data.toml.*path=URL"):
            mh.data.dataset("x", project=config({"driver": "fsspec", "url": url}, "x")).open()
        found = mh.data.dataset("x", path=url)
        for one in (found, pickle.loads(pickle.dumps(found))):
            assert {blob.name: blob.read_bytes() for blob in one.open().walk()} == CONTENT


def test_a_data_set_is_pickled(folder):
    found = mh.data.dataset("x?a=b#d", path=folder)
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found
    assert (copy.query, copy.fragment) == ({"a": "b"}, "d")
    assert copy.open().keys() == found.open().keys()


def test_what_type_says_is_what_must_be_there(folder):
    storage = {"driver": "FileSystem", "path": str(folder), "type": "Blob"}
    with pytest.raises(UsageError, match=r"expected a file, and .* is a folder"):
        mh.data.dataset("content", project=config(storage)).open()
    storage = {"driver": "FileSystem", "path": str(folder / "d.txt"), "type": "File"}
    assert mh.data.dataset("content", project=config(storage)).open().name == "d.txt"
    with pytest.raises(UsageError, match="single file"):
        mh.data.dataset("content#a", project=config(storage)).open()


def test_a_relative_path_is_from_the_working_directory(folder, monkeypatch):
    storage = {"driver": "FileSystem", "path": "content"}
    with pytest.raises(NotThere, match="write @__DIR__/content"):
        mh.data.dataset("content", project=config(storage)).open()
    monkeypatch.chdir(folder.parent)
    assert "d.txt" in mh.data.dataset("content", project=config(storage)).open()


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ({"driver": "FileSystem"}, ["storage.path: is missing (text in quotes)"]),
        (
            {"driver": "FileSystem", "path": 5, "type": "Tree", "cache": 5},
            [
                "storage.type: expected one of Blob, File, BlobTree, FileTree, got 'Tree'",
                "storage.cache: expected true or a table, got 5",
                "storage.path: expected text in quotes, got 5",
            ],
        ),
        (
            {"driver": "S3", "bucket": "s3://b", "zone": "x", "endpoint_url": "h", "anon": 1},
            [
                "storage.zone: is not known; there are driver, type, cache, bucket, prefix, "
                "region, profile, endpoint_url, anon",
                "storage.bucket: 's3://b' is no name of a bucket: no s3://, no '/'",
                "storage.anon: expected true or false, got 1",
                "storage.endpoint_url: expected http(s)://..., got 'h'",
            ],
        ),
        (
            {"driver": "fsspec", "url": "/x", "cache": {"fodler": "x"}},
            [
                "storage.cache.fodler: is not known; there are folder",
                "storage.url: '/x' is no URL (driver = 'FileSystem' takes a path)",
            ],
        ),
        (
            {"driver": "TomlDataStorage", "data": {"a": "!", "b/c": "", "d": {"e": 5, "..": ""}}},
            [
                "storage.data.a: is not base64",
                "storage.data: 'b/c' is no name of a file or folder",
                "storage.data.d.e: expected base64 text or a table, got 5",
                "storage.data.d: '..' is no name of a file or folder",
            ],
        ),
        (
            {"driver": "TomlDataStorage", "type": "Blob", "data": {}},
            ["storage.data: expected base64 text, as type says"],
        ),
        (
            {"driver": "Nonsense"},
            [
                "storage.driver: expected one of FileSystem, TomlDataStorage, S3, "
                "JuliaHubDataRepo, fsspec, got 'Nonsense'"
            ],
        ),
    ],
)
def test_all_that_is_wrong_with_a_storage_is_told(storage, said):
    with pytest.raises(RegistryError) as caught:
        mh.data.dataset("content", project=config(storage)).open()
    assert list(caught.value.problems) == said
    assert str(caught.value).startswith("data project: 'content' cannot be opened:")


def test_buckets_are_told_to_s3fs():
    theirs = {"driver": "JuliaHubDataRepo", "bucket_region": "r", "bucket": "b", "version": "v1"}
    theirs |= {"prefix": "/a/b::c/", "aws_profile": "p", "type": "BlobTree"}
    ours = {"driver": "S3", "region": "r", "bucket": "b", "prefix": "a/b::c", "profile": "p"}
    for storage in (theirs, ours):
        store = open_storage(storage, "F").store
        assert isinstance(store, UrlStore)
        assert (store.protocol, store.path) == ("s3", "b/a/b::c")
        assert store.options == {"profile": "p", "client_kwargs": {"region_name": "r"}}
    more = {"driver": "S3", "bucket": "b", "anon": True, "endpoint_url": "http://h"}
    assert open_storage(more, "F").store.options == {"anon": True, "endpoint_url": "http://h"}


def test_the_room_is_part_of_the_public_face():
    assert set(mh.data.__all__) >= {"dataset", "DataSet", "Blob", "BlobTree", "register"}
    for name in mh.data.__all__:
        assert getattr(mh.data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mh.data.nonsense
