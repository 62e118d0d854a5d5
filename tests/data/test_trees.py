"""Tables over data sets: the same samples from a folder, from its blobs, and from elsewhere."""

from __future__ import annotations

import pickle
import shutil

import fsspec
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from manyhands.core.errors import NotThere, UsageError
from manyhands.data import BlobTree, CsvTable, ImageTree, JsonlTable, dataset
from manyhands.data.files import as_tree
from manyhands.data.picture import read_picture
from manyhands.data.stores import LocalStore
from tests.data.kit import bad


@pytest.fixture
def folder(tmp_path):
    digits = load_digits()
    base = tmp_path / "data"
    for number in range(12):
        place = base / "images" / str(digits.target[number] % 3)
        place.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 15.9).astype("uint8").tobytes()
        Image.frombytes("L", (8, 8), pixels).save(place / f"{number:02}.png")
    (base / "images" / "1" / "07.png").write_bytes(b"\x89PNG")
    (base / "rows.jsonl").write_text('{"a": 1}\n\n{"a": 2}\nwhat\n')
    (base / "rows.csv").write_text('a,b\n1,"x\ny"\n2,z\n')
    return base


@pytest.fixture(params=["path", "blobs", "memory", "url"])
def tree(request, folder):
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/tables", recursive=True)
    yield {
        "path": lambda name: folder / name,
        "blobs": lambda name: BlobTree.at(folder)[name],
        "memory": lambda name: BlobTree.at("memory://tables")[name],
        "url": lambda name: f"memory://tables/{name}",
    }[request.param]
    memory.rm("/tables", recursive=True)


def test_images(tree, folder):
    table, plain = ImageTree(tree("images")), ImageTree(folder / "images")
    assert table.classes == plain.classes == ("0", "1", "2")
    assert list(table.labels) == list(plain.labels)
    names = [table.where(i).rpartition("images/")[2] for i in range(len(table))]
    (spoilt,) = [i for i, name in enumerate(names) if name == "1/07.png"]
    for i in range(len(table)):
        assert plain.where(i).endswith(names[i])
        if i != spoilt:
            assert torch.equal(table[i][0], plain[i][0])
    assert bad(lambda: table[spoilt]).where.endswith("1/07.png")
    assert torch.equal(pickle.loads(pickle.dumps(table))[0][0], plain[0][0])


def test_rows(tree, cache, folder):
    lines, rows = JsonlTable(tree("rows.jsonl")), CsvTable(tree("rows.csv"), types={"a": int})
    assert [lines[0], lines[1], len(lines)] == [{"a": 1}, {"a": 2}, 3]
    assert bad(lambda: lines[2]).where.endswith("rows.jsonl:4")
    assert [rows[i] for i in (1, 0)] == [{"a": 2, "b": "z"}, {"a": 1, "b": "x\ny"}]
    assert pickle.loads(pickle.dumps(lines))[1] == {"a": 2}
    # Nothing is written into a data set: there the index is in the cache.
    beside = len(list(folder.glob("*.mhindex")))
    assert sorted((beside, len(list(cache.rglob("*.mhindex"))))) == [0, 2]


def test_a_file_that_went_away_is_a_bad_sample(folder):
    table = ImageTree(BlobTree.at(folder / "images"))
    shutil.rmtree(folder / "images" / "0")
    assert bad(lambda: table[0]).reason == "it is not there, or is no plain file"


def test_a_url_that_leads_nowhere():
    for make in (ImageTree, JsonlTable):
        with pytest.raises(NotThere):
            make("memory://nowhere/at/all")


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "a/../../secret.png", "."])
@pytest.mark.parametrize("blobs", [False, True])
def test_a_name_only_leads_down(folder, name, blobs):
    """Of an image in a list that somebody else has written. It is bad; nothing is read."""
    shutil.copy(folder / "images" / "0" / "00.png", folder / "secret.png")
    path = folder / "images"
    tree = as_tree(BlobTree.at(path) if blobs else path)
    error = bad(lambda: read_picture(tree, name, "row 7"))
    assert error.where == "row 7"
    with pytest.raises(UsageError, match="no path inside"):
        tree[name]


def test_a_sample_takes_one_way_to_its_place(folder, monkeypatch):
    """What is not on this machine is not first asked what it is."""
    table = ImageTree(BlobTree.at(folder / "images"))
    asked = []
    monkeypatch.setattr(LocalStore, "kind", lambda self, key: asked.append(key))
    assert table[0][0].shape == (3, 8, 8)
    assert not asked


def test_a_tree_reads_a_file_of_its_own(folder):
    tree = BlobTree.at(folder)
    assert tree.read_blob("rows.jsonl") == (folder / "rows.jsonl").read_bytes()
    with pytest.raises(NotThere):
        tree.read_blob("nothing")
    with pytest.raises(UsageError, match="no path inside"):
        tree.read_blob("../x")


@pytest.mark.parametrize("table", [JsonlTable, CsvTable, ImageTree])
def test_a_data_set_has_to_be_opened(table, folder):
    with pytest.raises(UsageError, match="a DataSet is no") as caught:
        table(dataset("pictures", path=folder))
    assert "open()" in caught.value.hint
