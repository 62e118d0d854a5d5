"""Pictures and texts: what is written for all processes of a machine, and what users bring."""

from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics

import pytest
import torch
from PIL import Image

from manyhands.compat.deeppool.tables import DEVIATION, MEAN, Fitted, pictures, text, written
from manyhands.core.errors import DataError, UsageError


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_digits(tmp_path):
    found = pictures("digits", None, px=16, folder=tmp_path)
    assert (len(found.training), len(found.evaluation), found.num_classes) == (1500, 297, 10)
    image, label = found.training[0]
    assert image.shape == (3, 16, 16)
    assert label == 0
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_photos(tmp_path):
    found = pictures("photos", None, px=32, folder=tmp_path)
    assert found.num_classes == 2
    assert len(found.training) > len(found.evaluation) > 50
    image, _ = found.evaluation[0]
    assert image.std() > 0.1  # there is something in it
    seen = {name.partition("/")[2] for name in files_of(tmp_path / "photos" / "train")}
    assert not seen & {name.partition("/")[2] for name in files_of(tmp_path / "photos" / "test")}


def test_of_many_that_write_at_once_one_is_first(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda _: written(tmp_path, "digits"), range(4)))
    assert set(places) == {tmp_path / "digits"}
    assert len(files_of(tmp_path)) == 1797  # no drafts are left


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        written(tmp_path / "file", "digits")


@pytest.fixture
def pets(tmp_path):
    for number in range(20):
        for name, colour in (("cats", (250, 0, 0)), ("dogs", (0, 0, 250))):
            place = tmp_path / "pets" / name / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), colour).save(place)
    return tmp_path / "pets"


def test_a_folder_of_classes_and_every_tenth_for_the_evaluation(pets):
    found = pictures(str(pets), None, px=8)
    assert (len(found.training), len(found.evaluation), found.num_classes) == (36, 4, 2)
    sample = [found.training.where(index) for index in range(36)]
    assert not {found.evaluation.where(index) for index in range(4)} & set(sample)
    assert {label for _, label in (found.evaluation[index] for index in range(4))} == {0, 1}


def test_a_folder_to_evaluate_on(pets):
    found = pictures(str(pets), str(pets), px=8)
    assert (len(found.training), len(found.evaluation)) == (40, 40)


def test_pictures_are_cut_to_their_middle_and_normalised():
    image = torch.zeros(3, 10, 20, dtype=torch.uint8)
    image[0, :, 5:15] = 255  # the middle is red
    made = Fitted(4)(image)
    values = torch.tensor([1.0, 0.0, 0.0])
    wanted = (values - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    torch.testing.assert_close(made, wanted[:, None, None].expand(3, 4, 4))


@pytest.mark.parametrize(
    ("data", "evaluation", "px", "says"),
    [
        ("nowhere", None, 8, "no folder nowhere"),
        ("PETS", "nowhere", 8, "no folder nowhere"),
        ("digits", "PETS", 8, "brings what it is evaluated on"),
        ("PETS", None, 0, "0 pixels"),
        ("EMPTY", None, 8, "no images"),
    ],
)
def test_what_cannot_be_used(pets, tmp_path, data, evaluation, px, says):
    (tmp_path / "empty").mkdir()
    names = {"PETS": str(pets), "EMPTY": str(tmp_path / "empty")}
    with pytest.raises(UsageError, match=says):
        pictures(names.get(data, data), names.get(evaluation, evaluation), px=px)


def test_pythons_documentation():
    found = text("python", length=64)
    x, y = found.training[0]
    first = topics[sorted(topics)[0]].encode()[:65]
    assert bytes(x.tolist()) == first[:-1]
    assert bytes(y.tolist()) == first[1:]
    assert len(found.training) > 8 * len(found.evaluation) > 0


def test_a_text_of_ones_own(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    found = text(str(tmp_path / "text"), length=4)
    assert (len(found.training), len(found.evaluation)) == (44, 4)
    assert found.training[43][1].tolist() == [173, 174, 175, 176]
    with pytest.raises(IndexError):
        found.training[44]


@pytest.mark.parametrize(
    ("content", "length", "says"),
    [
        (b"short", 8, "5 bytes"),
        (b"", 8, "0 bytes"),
        (b"x" * 99, 0, "of 0 bytes"),
        (None, 8, "read"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, content, length, says):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        text(str(tmp_path / "text"), length=length)
