"""Images of every kind as the same kind of tensor; broken files by name."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from manyhands.core.errors import DataError, UsageError
from manyhands.data.blobs import BlobTree
from manyhands.data.images import ImageTree
from manyhands.data.picture import decode
from tests.data.kit import bad

WIDE, HIGH = 6, 4
# Left to right it becomes red, top to bottom green: no two corners are alike.
PIXELS = [(40 * x, 60 * y, 7) for y in range(HIGH) for x in range(WIDE)]


def picture(mode: str = "RGB") -> Image.Image:
    image = Image.new("RGB", (WIDE, HIGH))
    image.putdata(PIXELS)
    return image.convert(mode)


def packed(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def tensor(pixels) -> torch.Tensor:
    return torch.tensor(pixels, dtype=torch.uint8).view(HIGH, WIDE, 3).permute(2, 0, 1)


def real_jpeg() -> bytes:
    """A photograph, as it came from a camera."""
    from importlib.resources import files

    return files("sklearn.datasets.images").joinpath("china.jpg").read_bytes()


def test_the_tensor_of_a_photograph():
    got = decode(real_jpeg())
    (china, _) = load_sample_images().images
    assert got.dtype == torch.uint8
    assert got.is_contiguous()
    assert torch.equal(got, torch.tensor(china).permute(2, 0, 1))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "PPM"])
def test_kinds_without_loss(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert torch.equal(decode(packed(picture(), kind, **options)), tensor(PIXELS))


def test_grey():
    expected = tensor([(v, v, v) for v in picture("L").tobytes()])
    assert torch.equal(decode(packed(picture("L"))), expected)
    assert torch.equal(decode(packed(picture("LA"))), expected)
    ink = picture("1")
    bits = tensor([(v, v, v) for v in ink.convert("L").tobytes()])
    assert torch.equal(decode(packed(ink)), bits)


def test_palette_with_and_without_transparency():
    image = picture().quantize(24)
    expected = tensor(list(image.convert("RGB").tobytes()))
    assert torch.equal(decode(packed(image)), expected)
    for transparency in (3, bytes(range(24))):
        assert torch.equal(decode(packed(image, transparency=transparency)), expected)


def test_alpha_is_left_out():
    image = picture("RGBA")
    image.putalpha(17)
    assert torch.equal(decode(packed(image)), tensor(PIXELS))


def test_cmyk():
    """As printers have it: black is the absence of light, also in Adobe's inverted files."""
    data = packed(picture("CMYK"), "JPEG", quality=100, subsampling=0)
    off = (decode(data).int() - tensor(PIXELS).int()).abs()
    assert int(off.max()) < 12


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_of_grey_are_not_cut_off_at_255(kind):
    values = [257 * i for i in range(24)] + []
    values[-1] = 65535
    image = Image.frombytes("I;16", (WIDE, HIGH), struct.pack("<24H", *values))
    got = decode(packed(image, kind))
    assert got.flatten().tolist() == 3 * ([*range(23), 255])


def test_16_bits_big_endian():
    data = b"P5 2 1 65535\n" + struct.pack(">2H", 65535, 257 * 9)
    assert decode(data).tolist() == [[[255, 9]]] * 3


def test_values_without_a_known_range_are_bad():
    for mode, form, value in (("F", "<24f", 0.5), ("I", "<24i", 70_000), ("I", "<24i", -1)):
        image = Image.frombytes(mode, (WIDE, HIGH), struct.pack(form, *[value] * 24))
        with pytest.raises(ValueError, match="range is not known"):
            decode(packed(image, "TIFF"))


TURNED = {  # as the camera was held: from what is stored to what is upright
    1: lambda t: t,
    2: lambda t: t.flip(2),
    3: lambda t: t.flip(1, 2),
    4: lambda t: t.flip(1),
    5: lambda t: t.transpose(1, 2),
    6: lambda t: t.transpose(1, 2).flip(2),
    7: lambda t: t.transpose(1, 2).flip(1, 2),
    8: lambda t: t.transpose(1, 2).flip(1),
}


@pytest.mark.parametrize("orientation", [*TURNED, 0, 9])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
def test_exif_turns_it_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
    plain = decode(packed(picture(), kind, **options))
    got = decode(packed(picture(), kind, exif=exif, **options))
    assert torch.equal(got, TURNED.get(orientation, TURNED[1])(plain))


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0", b"Exif\0\0rubbish" * 9])
def test_broken_exif_turns_nothing(exif):
    plain = decode(packed(picture(), "JPEG"))
    assert torch.equal(decode(packed(picture(), "JPEG", exif=exif)), plain)


@pytest.mark.parametrize("part", [0, 1, 20, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "BMP", "WEBP"])
def test_cut_off(kind, part):
    photograph = Image.open(io.BytesIO(real_jpeg())).resize((64, 43))
    data = packed(photograph, kind)
    size = int(part * len(data)) if isinstance(part, float) else part
    with pytest.raises(ValueError, match=r"."):
        decode(data[:size])


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")]
)
def test_an_image_that_there_is_no_memory_for_is_not_bad(monkeypatch, error):
    def starved(image):
        raise error

    monkeypatch.setattr("manyhands.data.picture._tensor", starved)
    with pytest.raises(type(error)) as caught:
        decode(packed(picture()))
    assert caught.value is error


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "BMP", "WEBP"])
def test_rubbish_is_never_worse_than_a_bad_sample(kind):
    """Bits turned at random: an image, or ValueError; nothing else, and no crash."""
    data = packed(picture().resize((32, 32)), kind)
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        spoilt = bytearray(data)
        for place in torch.randint(0, len(data), (4,), generator=generator).tolist():
            spoilt[place] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        try:
            got = decode(bytes(spoilt))
        except ValueError:
            continue
        assert got.shape[0] == 3


# -- trees ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """Real digits, a folder a class, and some of what else is in folders."""
    digits = load_digits()
    for number in range(30):
        folder = tmp_path / "tree" / str(digits.target[number])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 15.9).astype("uint8").tobytes()
        Image.frombytes("L", (8, 8), pixels).save(folder / f"{number:03}.png")
    return tmp_path / "tree"


def test_a_class_is_a_folder(tree):
    table = ImageTree(tree)
    digits = load_digits()
    assert table.classes == tuple("0123456789")
    assert len(table) == 30
    assert sorted(table.labels) == sorted(digits.target[:30].tolist())
    names = [table.where(i) for i in range(30)]
    assert names == sorted(str(p) for p in tree.rglob("*.png"))
    for i in (0, 17, 29, -1):
        image, label = table[i]
        number = int(table.where(i)[-7:-4])
        assert label == int(digits.target[number])
        expected = torch.tensor(digits.images[number] * 15.9).to(torch.uint8)
        assert torch.equal(image, expected.expand(3, 8, 8))
    with pytest.raises(IndexError):
        table[30]


def test_other_files_are_counted_and_left_out(tree):
    (tree / "0" / "notes.txt").write_text("not an image")
    (tree / "README").write_text("nor this")
    (tree / "0" / ".000.png").write_bytes(b"hidden")
    (tree / ".git" / "x").mkdir(parents=True)
    (tree / ".git" / "x" / "y.png").write_bytes(b"hidden")
    (tree / "empty").mkdir()
    table = ImageTree(tree)
    assert (len(table), table.left_out, len(table.classes)) == (30, 4, 10)


def test_images_at_any_depth_and_through_links(tree, tmp_path):
    deep = tree / "7" / "more" / "still"
    deep.mkdir(parents=True)
    (deep / "A.PNG").write_bytes((tree / "7" / "007.png").read_bytes())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.png").write_bytes((tree / "7" / "007.png").read_bytes())
    (tree / "7" / "linked").symlink_to(elsewhere)
    table = ImageTree(tree)
    assert len(table) == 32
    assert list(table.labels).count(7) == 5


def test_a_circle_of_links(tree):
    (tree / "7" / "up").symlink_to(tree)
    with pytest.raises(DataError, match="a link to a folder that it lies in"):
        ImageTree(tree)


def test_classes_of_another_tree(tree):
    """So an evaluation has the ids of the training, though some classes are missing."""
    table = ImageTree(tree, classes=["9", "3"])
    assert table.classes == ("9", "3")
    assert {table.where(i).split("/")[-2]: label for i, label in enumerate(table.labels)} == {
        "9": 0,
        "3": 1,
    }


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["3", "cat"], "no images in cat"),
        ([], "no images"),
        (["3", "3"], "twice"),
    ],
)
def test_classes_that_are_none(tree, classes, message):
    with pytest.raises(UsageError, match=message):
        ImageTree(tree, classes=classes)


def test_trees_that_are_none(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "empty", "no images"),
        (tmp_path / "nowhere", "not there"),
        (tree / "0" / "000.png", "is a file"),
        (tree / "0", "in no folder"),
        (5, "is no folder"),
    ]:
        with pytest.raises(UsageError, match=message):
            ImageTree(source)


@pytest.mark.parametrize("spoil", ["cut", "empty", "gone", "dangling"])
def test_a_bad_file_is_named_and_the_others_are_read(tree, spoil):
    table = ImageTree(tree)
    path = Path(table.where(11))
    match spoil:
        case "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "empty":
            path.write_bytes(b"")
        case _:
            path.unlink()
            if spoil == "dangling":
                path.symlink_to("/nowhere/at/all.png")
    for _ in range(2):
        error = bad(lambda: table[11])
        assert error.where == str(path)
        assert error.reason
    assert table[12][0].shape == (3, 8, 8)


def test_a_disk_that_fails_is_no_bad_sample(tree):
    class Tree:
        def __init__(self, inner):
            self._inner = inner

        def walk(self):
            return self._inner.walk()

        def __getitem__(self, name):
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        ImageTree(Tree(BlobTree.at(tree)))[0]


def test_a_transform_gets_the_tensor_and_its_error_says_for_which_file(tree):
    assert ImageTree(tree, transform=lambda image: image.float().mean())[0][0] > 0
    table = ImageTree(tree, transform=lambda image: image.no_such_method())
    with pytest.raises(AttributeError) as caught:
        table[4]
    assert table.where(4) in caught.value.__notes__[0]


def test_it_can_be_pickled_and_is_small(tree):
    table = ImageTree(tree)
    data = pickle.dumps(table)
    assert len(data) < 100 * len(table)
    assert torch.equal(pickle.loads(data)[5][0], table[5][0])


def test_without_pillow_it_says_what_to_install(tree, monkeypatch):
    table = ImageTree(tree)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"Pillow.*\n.*pip install 'manyhands\[images\]'"):
        table[0]
