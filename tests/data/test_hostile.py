"""Files that somebody else has made, and not for our good: nothing hangs, nothing takes all memory,
and nothing is written where it does not belong.
"""

from __future__ import annotations

import gzip
import json
import os
import stat

import pytest
from PIL import Image

from manyhands.core.errors import DataError, NotThere, RegistryError, UsageError
from manyhands.data import BlobTree, CsvTable, ImageTree, JsonlTable, Loader
from manyhands.data.cache import CachedStore
from manyhands.data.chunks import split
from manyhands.data.drivers import open_storage
from manyhands.data.index import SUFFIX
from manyhands.data.project import read_project
from manyhands.data.stores import LocalStore, UrlStore
from tests.data.kit import bad

pytestmark = pytest.mark.timeout(60)  # what hangs, hangs for ever


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def plug(path):
    os.mknod(path, stat.S_IFSOCK | 0o600)


SPECIAL = pytest.mark.parametrize("make", [pipe, endless, plug])


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("1\n2\n3\n")
    return path


@pytest.fixture
def images(tmp_path):
    """Three of them."""
    folder = tmp_path / "images" / "kind"
    folder.mkdir(parents=True)
    for name in "abc":
        Image.new("L", (4, 4)).save(folder / f"{name}.png")
    return folder.parent


def beside(path):
    return path.with_name(path.name + SUFFIX)


def test_a_name_that_a_terminal_would_obey(images, caplog):
    name = "\x1b[2Jcat\n.png"
    (images / "kind" / name).write_bytes(b"no image")
    with Loader(ImageTree(images), 2, bad="skip") as loader:
        list(loader)
        (error,) = loader.bad
    assert error.where.endswith(name)  # the file's own
    assert str(error).isprintable()
    assert str(error).endswith("it is no image of a format that Pillow knows")  # no address
    assert "cat" in caplog.text
    assert "\x1b" not in caplog.text


# -- what is no plain file ------------------------------------------------------------------------


@SPECIAL
def test_an_image_that_is_no_plain_file_is_a_bad_sample(images, make):
    make(images / "kind" / "b2.png")
    with Loader(ImageTree(images), 2, bad="skip", workers=1) as loader:
        assert sum(len(labels) for _, labels in loader) == 3
        (error,) = loader.bad
    assert error.where.endswith("b2.png")
    assert error.reason == "it is not there, or is no plain file"


@SPECIAL
def test_a_blob_that_is_no_plain_file_is_not_read(tmp_path, make):
    make(tmp_path / "x")
    blob = BlobTree.at(tmp_path).blob("x")
    with pytest.raises(NotThere, match="no plain file"):
        blob.read_bytes()
    with pytest.raises(NotThere, match="no plain file"):
        JsonlTable(blob)


@SPECIAL
def test_a_registry_that_is_no_plain_file(tmp_path, make):
    make(tmp_path / "Data.toml")
    with pytest.raises(RegistryError, match="no plain file"):
        read_project(tmp_path / "Data.toml")


@SPECIAL
def test_an_index_that_is_no_plain_file_is_left_alone(rows, make):
    make(beside(rows))
    with pytest.raises(UsageError, match="is there, and is no index"):
        JsonlTable(rows)
    assert os.path.lexists(beside(rows))


@SPECIAL
def test_what_is_no_plain_file_is_not_split(tmp_path, make):
    make(tmp_path / "x.jsonl")
    with pytest.raises(UsageError, match="no plain file"):
        split(tmp_path / "x.jsonl", 2)


@SPECIAL
def test_a_copy_that_is_no_plain_file_is_made_anew(rows, tmp_path, make):
    store = CachedStore(LocalStore(str(rows.parent)), str(tmp_path / "cache"))
    with store.open(rows.name) as file:
        assert file.read() == b"1\n2\n3\n"
    copy = store._copy(rows.name)
    copy.unlink()
    make(copy)
    with store.open(rows.name) as file:
        assert file.read() == b"1\n2\n3\n"
    assert copy.is_file()


# -- what is too large ----------------------------------------------------------------------------


def test_an_image_of_any_size_is_not_read_into_memory(images):
    """A file with a hole in it says that it has 4 TB, and costs nothing."""
    worst = images / "kind" / "b2.png"
    worst.touch()
    os.truncate(worst, 1 << 42)
    table = ImageTree(images)
    assert bad(lambda: table[2]).reason == f"it has more than {1 << 30} bytes"


def test_a_registry_of_any_size_is_not_read_into_memory(tmp_path):
    path = tmp_path / "Data.toml"
    path.touch()
    os.truncate(path, 1 << 42)
    with pytest.raises(RegistryError, match="4398046511104 bytes"):
        read_project(path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "before"), [(JsonlTable, b'1\n"%b"\n' % (b"0" * (2 << 20))), (CsvTable, b"a\n1\n")]
)
def test_a_line_without_an_end(tmp_path, monkeypatch, kind, before, packed):
    """A few kB, unpacked, may be more than there is memory."""
    monkeypatch.setattr("manyhands.data.access._LINE_BYTES", 3 << 20)
    path = tmp_path / ("lines.gz" if packed else "lines")
    with gzip.open(path, "wb") if packed else path.open("wb") as file:
        file.write(before + b"0" * (9 << 20))
    with pytest.raises(UsageError, match="a line of more than 3145728 bytes"):
        list(kind(path))


def test_a_line_without_an_end_is_not_split(tmp_path, monkeypatch):
    monkeypatch.setattr("manyhands.data.access._LINE_BYTES", 3 << 20)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1\n" + b"0" * (9 << 20))
    with pytest.raises(UsageError, match="a line of more than 3145728 bytes"):
        split(path, 2)
    assert list(tmp_path.iterdir()) == [path]


def test_a_cell_that_is_too_long_for_python_says_what_can_be_done(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text(f"a,b\n{'x' * 200_000},1\n2,3\n")
    table = CsvTable(path)
    assert "csv.field_size_limit" in bad(lambda: table[0]).reason
    assert table[1] == {"a": "2", "b": "3"}


# -- what is made up ------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{"samples": -1, "extra": 4}, {"samples": 4, "extra": -1}])
def test_an_index_of_fewer_than_no_samples_is_none(rows, changed):
    assert len(JsonlTable(rows)) == 3
    data = beside(rows).read_bytes()
    header = {**json.loads(data[:512]), **changed}
    beside(rows).write_bytes(json.dumps(header).encode().ljust(512) + data[512:])
    table = JsonlTable(rows)
    assert [table[i] for i in range(len(table))] == [1, 2, 3]


def test_a_turn_makes_no_file_elsewhere(rows, tmp_path):
    rows.with_name(f".{beside(rows).name}.turn").symlink_to(tmp_path / "elsewhere")
    assert len(JsonlTable(rows)) == 3
    assert not (tmp_path / "elsewhere").exists()


def test_a_cache_that_cannot_be_written_is_no_bad_sample(images, tmp_path):
    """Else a training that skips bad samples would skip all of them, and say they are not there."""
    (tmp_path / "cache").touch()
    store = CachedStore(LocalStore(str(images)), str(tmp_path / "cache"))
    with (
        Loader(ImageTree(BlobTree(store, "", "")), 2, bad="skip") as loader,
        pytest.raises(DataError, match="cannot be copied to") as caught,
    ):
        next(iter(loader))
    assert not isinstance(caught.value, NotThere)


def test_a_folder_in_the_place_of_a_copy(rows, tmp_path):
    store = CachedStore(LocalStore(str(rows.parent)), str(tmp_path / "cache"))
    store._copy(rows.name).mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be copied to"):
        store.open(rows.name)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        *((url, {}) for url in ("simplecache::https://host/.bashrc", "filecache::s3://b/x")),
        *((url, {}) for url in ("reference://", "cached::memory://x", "blockcache::s3://b/x")),
        *((url, {}) for url in ("zip://a::simplecache::https://host/x", "dask::file:///x")),
        ("dir://x", {"target_protocol": "simplecache", "target_options": {}}),
        ("zip://x", {"target": "simplecache::https://host/x"}),
        ("dir://x", {"target_options": {"target_protocol": "reference"}}),
    ],
)
def test_a_registry_does_not_choose_file_systems_that_do_more_than_read(url, options):
    """They write what others send under names that others choose, or evaluate it."""
    with pytest.raises(RegistryError, match="is not for a Data"):
        open_storage({"driver": "fsspec", "url": url, "options": options}, "Data.toml, x")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/simplecache", {"default_cache_type": "blockcache"}),
        ("zip://reference::https://host/x", {}),
        ("dir://x", {"target_protocol": "memory"}),
    ],
)
def test_others_may_be_called_like_them(url, options):
    storage = {"driver": "fsspec", "url": url, "options": options}
    assert open_storage(storage, "Data.toml, x").store == UrlStore(url, options)
