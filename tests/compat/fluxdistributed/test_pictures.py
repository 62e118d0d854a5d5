"""ImageNet's tables, with real digits in JPEG files: solutions, paths, minibatches."""

import collections
import shutil

import pytest
import torch

import manyhands as mh
from manyhands.compat.fluxdistributed import (
    labels,
    makepaths,
    minibatch,
    prepare_training,
    preprocess,
    train_solutions,
)
from manyhands.core.errors import UsageError
from manyhands.data.picture import decode
from manyhands.data.table import BadSample
from tests.compat.fluxdistributed.imagenet import NAMES, SIDE, SYNSETS
from tests.compat.fluxdistributed.models import SGD, mlp


@pytest.fixture
def tree(imagenet):
    return mh.data.BlobTree.at(imagenet)


def test_labels_are_synsets_and_descriptions_by_id(tree):
    found = labels(tree)
    assert [label.synset for label in found] == SYNSETS
    assert [label.description for label in found] == NAMES
    assert [label.id for label in found] == list(range(10))


@pytest.mark.parametrize("classes", [range(10), [3, 7]])
def test_solutions_have_ids_from_zero_and_those_of_the_classes_only(tree, classes):
    key = train_solutions(tree, "LOC_train_solution.csv", classes)
    assert collections.Counter(row.label for row in key) == dict.fromkeys(classes, 40)
    assert all(row.synset == SYNSETS[row.label] for row in key)
    val = train_solutions(tree, "LOC_val_solution.csv", classes)
    assert len(val) == 10 * len(classes)


def test_paths_of_all_three_splits(tree):
    row = train_solutions(tree, "LOC_train_solution.csv", [3])[0]
    assert makepaths([row]) == [f"ILSVRC/Data/CLS-LOC/train/{SYNSETS[3]}/{row.image}.JPEG"]
    assert makepaths([row], "val") == [f"ILSVRC/Data/CLS-LOC/val/{row.image}.JPEG"]
    assert makepaths([row], "test") == [f"ILSVRC/Data/CLS-LOC/test/{row.image}.JPEG"]
    assert tree[makepaths([row])[0]].read_bytes()[:2] == b"\xff\xd8"  # of a JPEG


def thumb(image):
    return image.float().mean(0)


def test_a_minibatch_has_rows_of_the_key_each_once(imagenet):
    key = train_solutions(imagenet, "LOC_train_solution.csv", [1, 2])
    x, y = minibatch(imagenet, key, 80, transform=thumb)
    assert x.shape == (80, SIDE, SIDE)
    assert collections.Counter(y.tolist()) == {1: 40, 2: 40}
    with pytest.raises(UsageError, match="81 of 80 rows, each of them once"):
        minibatch(imagenet, key, 81)
    with pytest.raises(UsageError, match="0 of 80 rows"):
        minibatch(imagenet, key, 0)


def test_a_minibatch_is_random_and_of_16_rows(imagenet):
    key = train_solutions(imagenet, "LOC_train_solution.csv", range(10))

    def drawn(seed):
        return minibatch(
            imagenet, key, transform=thumb, generator=torch.Generator().manual_seed(seed)
        )

    assert len(drawn(0)[0]) == 16
    assert torch.equal(drawn(0)[0], drawn(0)[0])
    assert not torch.equal(drawn(0)[0], drawn(1)[0])


def test_with_replacement_rows_may_come_again(imagenet):
    key = train_solutions(imagenet, "LOC_train_solution.csv", [5])
    read = []

    def note(image):
        read.append(image.sum().item())
        return image.float()

    x, y = minibatch(imagenet, key, 60, True, transform=note)
    assert len(x) == 60
    assert set(y.tolist()) == {5}
    assert len(set(read)) < 60


def test_pictures_are_those_of_their_rows(imagenet, tree):
    key = train_solutions(imagenet, "LOC_val_solution.csv", [8])
    x, y = minibatch(tree, key, 10, split="val", transform=lambda image: image)
    files = [tree[path].read_bytes() for path in makepaths(key, "val")]
    expected = {decode(data).sum().item() for data in files}
    assert {picture.sum().item() for picture in x} == expected
    assert y.tolist() == [8] * 10


@pytest.mark.parametrize("size", [(300, 500), (500, 300), (224, 224), (40, 30), (256, 256)])
def test_preprocess_cuts_out_the_middle_and_normalises_once(size):
    image = torch.full((3, *size), 128, dtype=torch.uint8)
    image[:, : size[0] // 20] = 0  # at the edge, which is cut off
    made = preprocess(image)
    assert made.shape == (3, 224, 224)
    assert made.dtype is torch.float32
    expected = [(128 / 255 - mean) / deviation for mean, deviation in [(0.485, 0.229)]]
    assert made[0, 112, 112] == pytest.approx(expected[0], abs=1e-5)


def test_preprocess_keeps_what_is_up(imagenet):
    image = torch.zeros(3, 300, 300, dtype=torch.uint8)
    image[:, :150] = 255
    made = preprocess(image)
    assert made[:, 20].min() > made[:, 200].max()


def test_a_setup_reads_the_pictures_of_its_key(imagenet, monkeypatch, tmp_path):
    key = train_solutions(imagenet, "LOC_train_solution.csv", range(10))
    file = tmp_path / "Data.toml"
    file.write_text(
        f"""data_config_version = 1

[[datasets]]
name = "imagenet_local"
uuid = "c7b2f4de-9f1f-4c9c-8c57-1f6a3a5d2b10"

    [datasets.storage]
    driver = "FileSystem"
    type = "BlobTree"
    path = "{imagenet}"
"""
    )
    monkeypatch.setenv("MANYHANDS_DATA_PATH", str(file))
    places = [
        {},  # by the name that FluxDistributed has built in
        {"dataset": imagenet},
        {"dataset": f"file://{imagenet}"},
        {"dataset": mh.data.BlobTree.at(imagenet)},
        {"dataset": mh.data.dataset("imagenet_local")},
    ]
    for place in places:
        setup, _ = prepare_training(mlp(), key, ["cpu"], SGD, 4, classes=[4], **place)
        assert setup.source.size == 40
        x, y = setup.source.dataset[7]
        assert x.shape == (3, 224, 224)
        assert y == 4
        assert str(imagenet) in setup.source.dataset.where(7)
    with pytest.raises(UsageError, match="class 10 of 10"):
        prepare_training(mlp(), key, ["cpu"], SGD, 4, classes=[4, 10])
    mapping = mh.data.Blob.at(imagenet / "LOC_synset_mapping.txt")
    with pytest.raises(UsageError, match="is one file"):
        prepare_training(mlp(), key, ["cpu"], SGD, 4, dataset=mapping)


def test_a_picture_that_is_broken_is_named(imagenet, tmp_path):
    shutil.copytree(imagenet, tmp_path / "copy")
    key = train_solutions(tmp_path / "copy", "LOC_train_solution.csv", [6])
    place = tmp_path / "copy" / makepaths([key[3]])[0]
    place.write_bytes(place.read_bytes()[:200])
    with pytest.raises(BadSample, match=str(place)):
        minibatch(tmp_path / "copy", key, 40)
