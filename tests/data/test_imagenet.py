"""ImageNet's layout, in small: real digits as JPEG files, where Kaggle's archive has its images."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from manyhands.core.errors import UsageError
from manyhands.data.imagenet import (
    ImageNetTable,
    Label,
    Solution,
    labels,
    makepaths,
    path_of,
    submission_images,
    train_solutions,
    val_solutions,
)
from tests.data.kit import bad

SYNSETS = [f"n{1440764 + 17 * digit:08}" for digit in range(10)]
TRAIN, VAL, TEST = 40, 20, 5


def box(digit: int) -> str:
    return f"{SYNSETS[digit]} 1 2 7 8 "


@pytest.fixture
def archive(tmp_path):
    digits = load_digits()
    root = tmp_path / "imagenet"
    data = root / "ILSVRC" / "Data" / "CLS-LOC"
    rows: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for number in range(TRAIN + VAL + TEST):
        digit = int(digits.target[number])
        pixels = (digits.images[number] * 15.9).astype("uint8").tobytes()
        image = Image.frombytes("L", (8, 8), pixels).convert("RGB")
        if number < TRAIN:
            split, name = "train", f"{SYNSETS[digit]}_{number}"
            file = data / "train" / SYNSETS[digit] / f"{name}.JPEG"
        else:
            split = "val" if number < TRAIN + VAL else "test"
            name = f"ILSVRC2012_{split}_{number:08}"
            file = data / split / f"{name}.JPEG"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file, "JPEG", quality=95)
        rows[split].append(f"{name},{box(digit) if split != 'test' else ''}")
    for split, file in (
        ("train", "LOC_train_solution.csv"),
        ("val", "LOC_val_solution.csv"),
        ("test", "LOC_sample_submission.csv"),
    ):
        (root / file).write_text("\n".join(["ImageId,PredictionString", *rows[split], ""]))
    mapping = "".join(f"{synset} digit {d}, {d}\n" for d, synset in enumerate(SYNSETS))
    (root / "LOC_synset_mapping.txt").write_text(mapping)
    return root


def test_labels_are_counted_from_0(archive):
    found = labels(archive)
    assert found[3] == Label(3, SYNSETS[3], "digit 3, 3")
    assert [label.id for label in found] == list(range(10))
    assert [label.synset for label in found] == SYNSETS


def test_solutions_and_paths_of_all_splits(archive):
    train, val, test = train_solutions(archive), val_solutions(archive), submission_images(archive)
    assert (len(train), len(val), len(test)) == (TRAIN, VAL, TEST)
    targets = load_digits().target.tolist()
    assert [row.label for row in train] == targets[:TRAIN]
    assert [row.label for row in val] == targets[TRAIN : TRAIN + VAL]
    assert all(row.agrees for row in train)
    assert train[0] == Solution(f"{SYNSETS[0]}_0", SYNSETS[0], 0)
    for rows, split in ((train, "train"), (val, "val"), (test, "test")):
        paths = makepaths(rows, split)
        assert len(paths) == len(rows)
        assert all((archive / path).is_file() for path in paths)
    assert makepaths([row.image for row in train]) == makepaths(train)
    assert path_of(val[0], "val", root="x") == f"x/val/{val[0].image}.JPEG"
    assert train[5:7] == [train[5], train[6]]


@pytest.mark.parametrize("classes", [range(3), [7, 2], {5}])
def test_classes_are_ids_and_stay_what_they_are(archive, classes):
    found = train_solutions(archive, classes=classes)
    assert {row.label for row in found} == set(classes)
    every = train_solutions(archive)
    assert list(found) == [row for row in every if row.label in set(classes)]


def test_rows_whose_boxes_disagree_are_kept_and_reported(archive):
    path = archive / "LOC_train_solution.csv"
    lines = path.read_text().splitlines()
    digits = load_digits().target
    lines[4] += box((digits[3] + 1) % 10)
    lines[8] = f"{lines[8].split(',')[0]},{box((digits[7] + 1) % 10)}{box(int(digits[7]))}"
    lines[9] += box(int(digits[8]))  # two boxes of one class
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="the boxes of 2 images are of several classes"):
        found = train_solutions(archive)
    assert len(found) == TRAIN
    assert list(found.disagreeing) == [3, 7]
    assert [row.agrees for row in found[2:9]] == [True, False, True, True, True, False, True]
    # In train the folder says which it is, whatever comes first.
    assert [row.label for row in found] == digits[:TRAIN].tolist()


def test_a_disagreeing_row_of_val_has_the_class_of_its_first_box(archive):
    path = archive / "LOC_val_solution.csv"
    path.write_text(f"ImageId,PredictionString\nILSVRC2012_val_00000040,{box(4)}{box(6)}\n")
    with pytest.warns(UserWarning, match="ILSVRC2012_val_00000040"):
        (row,) = val_solutions(archive)
    assert row == Solution("ILSVRC2012_val_00000040", SYNSETS[4], 4, agrees=False)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("LOC_synset_mapping.txt", "", "names no class"),
        ("LOC_synset_mapping.txt", "n1 a\nn2 b\nn1 c\n", r"txt:3: n1 is there already, in line 1"),
        ("LOC_train_solution.csv", "a,b\n", r"csv:1: the columns are \['a', 'b'\]"),
        ("LOC_train_solution.csv", "", "the columns are"),
        ("LOC_train_solution.csv", "ImageId,PredictionString\n", "no image"),
        ("LOC_train_solution.csv", "ImageId,PredictionString\nx,n5 1 2 3\n", "csv:2: .* no list"),
        ("LOC_train_solution.csv", "ImageId,PredictionString\nx,\n", "csv:2: '' is no list"),
        ("LOC_train_solution.csv", "ImageId,PredictionString\nx\n", "csv:2: 1 columns"),
        ("LOC_train_solution.csv", "ImageId,PredictionString\nx,n5 1 2 3 4\n", "n5 is not in LOC"),
    ],
)
def test_files_that_are_not_as_they_should_be(archive, file, text, message):
    (archive / file).write_text(text)
    with pytest.raises(UsageError, match=message):
        train_solutions(archive)


def test_what_is_not_there(archive, tmp_path):
    with pytest.raises(UsageError, match=r"LOC_synset_mapping.txt is not there"):
        labels(tmp_path)
    for classes in ([10], [-1], [], 3, ["n01440764"], [1.5]):
        with pytest.raises(UsageError, match="ids from 0 to 9"):
            train_solutions(archive, classes=classes)
    with pytest.raises(UsageError, match="one of train, val, test"):
        makepaths(["x"], "validation")
    with pytest.raises(UsageError, match="nobody says"):
        ImageNetTable(archive, "test", classes=[1])


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_images_of_a_split(archive, split):
    table = ImageNetTable(archive, split, transform=lambda image: image.float())
    digits = load_digits()
    first = {"train": 0, "val": TRAIN, "test": TRAIN + VAL}[split]
    assert len(table) == {"train": TRAIN, "val": VAL, "test": TEST}[split]
    for i in range(len(table)):
        image, label = table[i] if split != "test" else (table[i], None)
        expected = torch.tensor(digits.images[first + i] * 15.9)
        assert float((image - expected).abs().mean()) < 6  # JPEG
        assert label in (None, int(digits.target[first + i]))
        assert table.where(i).startswith(f"{archive}/ILSVRC/Data/CLS-LOC/{split}/")


def test_a_bad_image_is_named(archive):
    table = ImageNetTable(archive, classes=range(5))
    with open(table.where(3), "r+b") as file:
        file.truncate(200)
    error = bad(lambda: table[3])
    assert error.where == table.where(3)
    assert table[4][1] < 5


def test_it_can_be_pickled_and_is_small(archive):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = pickle.loads(pickle.dumps(ImageNetTable(archive)))
    assert table[1][1] == 1


def test_trees_of_blobs(archive):
    """Anything that has files by their names will do."""

    class Tree:
        def __getitem__(self, name):
            from manyhands.data.blobs import Blob

            if not (archive / name).exists():
                raise KeyError(name)
            return Blob.at(archive / name)

        def walk(self):
            return iter(())

        def __str__(self):
            return "s3://bucket/imagenet"

    table = ImageNetTable(Tree())
    assert torch.equal(table[2][0], ImageNetTable(archive)[2][0])
    assert table.where(2).startswith("s3://bucket/imagenet/ILSVRC/")
    (archive / path_of(table.solutions[2])).unlink()
    assert bad(lambda: table[2]).reason == "it is not there, or is no plain file"
