"""Trees and files: the same content, wherever it lies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import zipfile
from pathlib import Path, PurePosixPath

import fsspec
import pytest

from manyhands.core.errors import DataError, NotThere, UsageError
from manyhands.data.blobs import Blob, BlobTree
from manyhands.data.registry import dataset
from manyhands.data.stores import UrlStore

from .conftest import CONTENT, config, embedded


def storage_of(driver, folder, tmp_path):
    if driver == "FileSystem":
        return {"driver": "FileSystem", "type": "BlobTree", "path": str(folder)}
    if driver == "TomlDataStorage":
        return {"driver": "TomlDataStorage", "type": "BlobTree", "data": embedded()}
    if driver == "memory":
        memory = fsspec.filesystem("memory")
        for name, data in CONTENT.items():
            memory.pipe_file(f"/content/{name}", data)
        return {"driver": "fsspec", "type": "BlobTree", "url": "memory://content"}
    if driver == "zip":
        with zipfile.ZipFile(tmp_path / "content.zip", "w") as archive:
            for name, data in CONTENT.items():
                archive.writestr(name, data)
        return {"driver": "fsspec", "url": f"zip://::file://{tmp_path}/content.zip"}
    assert driver == "cached"
    cache = {"folder": str(tmp_path / "copies")}
    return storage_of("memory", folder, tmp_path) | {"cache": cache}


def forget_archives():
    """fsspec keeps what it has opened, and so do the errors that a test has caught."""
    fsspec.get_filesystem_class("zip").clear_instance_cache()
    gc.collect()


@pytest.fixture(params=["FileSystem", "TomlDataStorage", "memory", "zip", "cached"])
def content(request, folder, tmp_path):
    """A data set of this content, by each driver."""
    yield dataset("content", project=config(storage_of(request.param, folder, tmp_path)))
    fsspec.filesystem("memory").store.clear()
    forget_archives()


def test_every_driver_gives_the_same(content):
    with content.open() as tree:
        assert isinstance(tree, BlobTree)
        assert [blob.name for blob in tree.walk()] == sorted(CONTENT)
        for name, data in CONTENT.items():
            blob = tree[name]
            assert (blob.name, blob.size, blob.read_bytes()) == (name, len(data), data)
            with blob.open() as file:
                assert file.read() == data
            with blob.open("rb") as file:
                assert file.seek(len(data) // 2) == len(data) // 2
                assert file.read(3) == data[len(data) // 2 :][:3]
        with tree["hello.txt"].open("r") as lines:
            assert list(lines) == ["Hello\n"]
        assert tree.keys() == list(tree) == ["d", "d.txt", "hello.txt"]
        assert len(tree) == 3
        assert [str(value) for value in tree.values()] == [str(tree[name]) for name in tree]
        assert dict(tree)["d"] == tree["d"] == tree.joinpath("d")
        assert tree["d"]["e/empty"].read_bytes() == tree.joinpath("d", "e", "empty").read_bytes()
        assert tree["d/e/"].keys() == tree[PurePosixPath("d/e")].keys() == ["empty"]
        assert [blob.name for blob in tree["d/e"].walk()] == ["empty"]
        assert tree[""] == tree
        assert (tree.isdir(), tree.isdir("d"), tree.isdir("d.txt")) == (True, True, False)
        assert tree.blob("d.txt").isdir() is False
        assert tree.tree("d").isdir()


def test_what_is_not_there(content):
    tree = content.open()
    assert "d/e/empty" in tree
    assert "d/e" in tree
    for name in ("no", "d/no", "hello.txt/no", "d/e/empty/no", "../x", "/hello.txt", "d//e", 5):
        assert name not in tree
    for name in ("no", "d/no", "hello.txt/no"):
        with pytest.raises(KeyError) as caught:
            tree[name]
        assert isinstance(caught.value, NotThere)
        assert str(caught.value) == f"{tree} has no {name!r}"
    with pytest.raises(UsageError, match="no path inside"):
        tree["../x"]
    with pytest.raises(NotThere, match="is a folder"):
        tree.blob("d")
    with pytest.raises(NotThere, match="is a file"):
        tree.tree("d.txt")
    with pytest.raises(UsageError, match="mode 'w'"):
        tree["d.txt"].open("w")


def test_a_place_inside(content):
    inside = dataset("content#d/e", project=config(content.storage)).open()
    assert inside.keys() == ["empty"]
    odd = dataset("content#d/%CE%B4%20%23%25%3F.txt", project=config(content.storage)).open()
    assert odd.read_bytes() == b"an odd name\n"
    with pytest.raises(KeyError):
        dataset("content#d/no", project=config(content.storage)).open()


def _read(tree, names, pipe):
    pipe.send([tree[name].read_bytes() for name in names])
    pipe.send(pickle.dumps(tree["d.txt"]))
    pipe.close()


@pytest.mark.parametrize("driver", ["FileSystem", "TomlDataStorage", "zip", "cached zip"])
def test_a_tree_is_pickled_into_a_spawned_process(driver, folder, tmp_path):
    storage = storage_of(driver.removeprefix("cached "), folder, tmp_path)
    if driver.startswith("cached"):
        storage["cache"] = {"folder": str(tmp_path / "copies")}
    tree = dataset("content", project=config(storage)).open()
    tree["d.txt"].read_bytes()  # it is open here, and must not travel so
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_read, args=(tree, list(CONTENT), theirs))
    process.start()
    theirs.close()
    try:
        assert ours.recv() == list(CONTENT.values())
        assert pickle.loads(ours.recv()) == tree["d.txt"]
    finally:
        process.join()
        process.close()
        ours.close()
        forget_archives()


def test_a_path_a_text_or_a_url_becomes_a_tree(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    expected = sorted(CONTENT)
    for place in (folder, str(folder), "content", f"file://{folder}", Path("content")):
        tree = BlobTree.at(place)
        assert [blob.name for blob in tree.walk()] == expected
        assert tree["d.txt"].local == folder / "d.txt"
        assert str(tree) == str(folder)
    assert Blob.at(folder / "d.txt").name == "d.txt"
    assert Blob.at(folder / "d.txt").read_bytes() == CONTENT["d.txt"]
    with pytest.raises(NotThere, match="no such file or folder"):
        BlobTree.at(folder / "no")
    with pytest.raises(UsageError, match="is a file"):
        BlobTree.at(folder / "d.txt")
    with pytest.raises(UsageError, match="is a folder"):
        Blob.at(str(folder))
    with pytest.raises(UsageError, match="no options"):
        BlobTree.at(folder, anon=True)


def test_places_are_shown_without_secrets():
    for url in ("memory://u:hunter2@h/x", "memory://h/x?a=1&X-Amz-Signature=hunter2&b=2"):
        store = UrlStore(url, {"secret": "hunter2"})
        said = [
            repr(store),
            store.place("a"),
            repr(Blob(store, "a", "a")),
            str(Blob(store, "a", "a")),
        ]
        assert all("hunter2" not in text and "memory://" in text for text in said[:2] + said[3:])
        assert "hunter2" not in said[2]


def test_a_token_before_the_name_of_a_web_server_is_not_shown():
    assert repr(UrlStore("https://hunter2@h/x")) == "UrlStore('https://***@h/x')"
    for plain in ("https://h/a@b", "https://h/x?mail=a@b", "sftp://me@h/x"):
        assert UrlStore(plain).place("") == plain


def test_a_url_that_fsspec_does_not_know():
    with pytest.raises(UsageError, match="cannot be opened"):
        BlobTree.at("nonsense://place")
    with pytest.raises(UsageError, match="cannot be opened") as caught:
        BlobTree.at("nonsense://user:hunter2@place")
    assert "hunter2" not in str(caught.value)


def test_links(folder):
    (folder / "d" / "linked").symlink_to(folder / "d" / "e")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "itself").symlink_to("itself")
    tree = BlobTree.at(folder)
    assert tree["d/linked/empty"].read_bytes() == b""
    names = [blob.name for blob in tree.walk()]
    assert {"d/linked/empty", "dangling", "itself"} <= set(names)
    assert names == sorted(names)
    assert "dangling" not in tree
    (folder / "d" / "e" / "round").symlink_to(folder)
    with pytest.raises(DataError, match="round is a link to a folder that it lies in"):
        list(tree.walk())


def test_names_that_are_no_text(folder):
    name = os.fsdecode(b"\xff\xfe")
    (folder / name).write_bytes(b"odd")
    tree = BlobTree.at(folder)
    assert name in tree.keys()  # noqa: SIM118
    assert tree[name].read_bytes() == b"odd"
    assert "\ud800" not in tree


def test_a_file_that_may_not_be_read(folder):
    if os.geteuid() == 0:
        (folder / "hello.txt").unlink()
        (folder / "hello.txt").mkdir()  # root may read all files, but no folder as a file
        blob = Blob(BlobTree.at(folder).store, "hello.txt", "hello.txt")
    else:
        (folder / "hello.txt").chmod(0)
        blob = BlobTree.at(folder)["hello.txt"]
    with pytest.raises(DataError, match=r"hello\.txt cannot be read"):
        blob.read_bytes()
