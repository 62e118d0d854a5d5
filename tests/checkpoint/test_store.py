"""Checkpoints: what is loaded is what was saved; the newest few are kept."""

import json
import math
import struct
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from torch import nn

from manyhands.checkpoint.store import Store
from manyhands.core.errors import UsageError
from manyhands.wire.tensors import DTYPES, TensorSpec, from_bytes
from tests.checkpoint.kit import bits, checkpoint_of, rounds, same


def test_what_was_saved_is_loaded(url):
    given = checkpoint_of(7)
    place = Store(url).save(given)
    found = Store(url).load()
    assert same(found.checkpoint, given)
    assert (found.place, found.broken) == (place, [])


def test_where_nothing_is_nothing_is_found(url):
    assert Store(url).load() == (None, None, [])
    assert Store(url).places() == []


def test_a_path_and_a_file_url_are_the_same_place(tmp_path):
    Store(tmp_path / "a").save(checkpoint_of(1))
    assert rounds(Store(f"file://{tmp_path}/a")) == [1]


def test_the_newest_is_loaded_or_the_one_asked_for(url):
    store = Store(url)
    for round in (3, 20, 100):
        store.save(checkpoint_of(round))
    assert store.load().checkpoint.round == 100
    assert same(store.load(20).checkpoint, checkpoint_of(20))
    assert store.load(21) == (None, None, [])


def test_the_newest_are_kept(url):
    store = Store(url, keep=2)
    for round in range(5):
        store.save(checkpoint_of(round))
        assert rounds(store) == [max(0, round - 1), round][-(round + 1) :]
    system, path = fsspec.url_to_fs(url)
    assert len(system.ls(path)) == 4  # nothing but two files of each


def test_a_round_that_is_saved_again_is_replaced(url):
    store = Store(url, keep=2)
    store.save(checkpoint_of(1))
    for seed in range(3):
        store.save(checkpoint_of(2, about={"seed": seed}))
    assert rounds(store) == [1, 2]
    assert store.load().checkpoint.about == {"seed": 2}


def test_what_was_just_saved_stays_even_if_it_is_old(url):
    """A run that went back: its checkpoints are of older rounds than those that are there."""
    store = Store(url, keep=1)
    store.save(checkpoint_of(9))
    store.save(checkpoint_of(4))
    assert rounds(store) == [4, 9]


def test_files_of_others_are_left_alone(tmp_path):
    for name in ("notes.json", "round-1.json", "round-000000000001-x.safetensors"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "round-000000000001-0123456789abcdef01234567.json").mkdir()
    before = set(tmp_path.iterdir())
    store = Store(tmp_path, keep=1)
    assert store.load() == (None, None, [])
    store.save(checkpoint_of(1))
    store.save(checkpoint_of(2))
    assert before < set(tmp_path.iterdir())
    assert rounds(store) == [2]


def again(tree, url, about=None):
    Store(url).save(checkpoint_of(1, tree=tree, about=about))
    return Store(url).load().checkpoint


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(name, tmp_path):
    raw = bytes(range(1, 65)) if name != "bool" else bytes([0, 1] * 32)
    given = from_bytes(TensorSpec(name, (64 // DTYPES[name].itemsize,)), raw)
    (loaded,) = again([given], tmp_path).tree
    assert loaded.dtype == given.dtype
    assert bytes(loaded.untyped_storage()) == raw


MATRIX = torch.arange(12.0).view(3, 4)
SHAPES = {
    "no dimension": torch.tensor(3, dtype=torch.int16),
    "empty": torch.zeros(0, 5),
    "transposed": MATRIX.t(),
    "every second": MATRIX[:, ::2],
    "expanded": torch.tensor([1.5]).expand(4, 3),
    "conjugated": torch.tensor([1 + 2j, -3j]).conj(),
    "negated": torch.tensor([1 + 2j, -3j]).conj().imag,
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bool, sliced": torch.tensor([True, False, True])[::2],
    "complex32, sliced": from_bytes(TensorSpec("complex32", (4,)), bytes(range(16)))[::2],
    "parameter": nn.Parameter(torch.ones(2)),
    "not finite": torch.tensor([math.nan, -math.inf, -0.0, 1e-45]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_tensor_comes_back(shape, tmp_path):
    (loaded,) = again([SHAPES[shape]], tmp_path).tree
    assert bits(loaded) == bits(SHAPES[shape])
    assert loaded.is_contiguous()
    assert not loaded.requires_grad


def test_tensors_that_share_memory_come_back_each_with_its_own(tmp_path):
    base = torch.arange(1000.0)
    given = {"whole": base, "tied": base, "part": base[10:20]}
    loaded = again(given, tmp_path).tree
    assert bits(loaded) == bits(given)
    loaded["whole"].zero_()
    assert bits([loaded["tied"], loaded["part"]]) == bits([given["tied"], given["part"]])


def test_of_a_view_only_what_it_shows_is_saved(tmp_path):
    again([torch.zeros(1 << 20)[:4]], tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4096


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path):
    (loaded,) = again([MATRIX.cuda().t()], tmp_path).tree
    assert loaded.device.type == "cpu"
    assert bits(loaded) == bits(MATRIX.t())


def test_numbers_and_texts_come_back_to_the_bit(url):
    odd_nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    given = {
        "floats": [math.nan, odd_nan, math.inf, -math.inf, -0.0, 0.1, 5e-324, 1.7e308],
        "integers": [2**53 + 1, -(2**63), 2**64 - 1, 10**5000, True],
        "texts": ["", "ü\x00\n\"'", "\ud800", "\u2028"],
        "bytes": (b"", bytes(range(256))),
    }
    loaded = again(given, url, about=given)
    assert bits(loaded.tree) == bits(given)
    assert bits(loaded.about) == bits(given)


def test_names_that_read_alike(url):
    given = {1: torch.ones(1), "1": torch.ones(2), "a.b": torch.ones(3), "a": {"b": torch.ones(4)}}
    assert bits(again(given, url).tree) == bits(given)


def test_any_reader_of_safetensors_takes_the_file(tmp_path):
    names = ("float64", "bfloat16", "bool", "uint16", "complex64", "float8_e4m3fn", "complex128")
    tree = {name: torch.ones(2, 3).to(DTYPES[name]) for name in names}
    place = Path(Store(tmp_path).save(checkpoint_of(1, tree=tree)))
    read = safetensors.torch.load_file(place.with_suffix(".safetensors"))
    bytes_of_complex = read.pop("state.complex128")  # a dtype that safetensors lacks
    assert bytes_of_complex.shape == (2, 3, 16)
    assert bits(bytes_of_complex.view(torch.complex128)[..., 0]) == bits(tree.pop("complex128"))
    assert bits(read) == bits({f"state.{name}": tensor for name, tensor in tree.items()})


def test_the_manifest_is_json_by_any_standard(tmp_path):
    place = Store(tmp_path).save(checkpoint_of(1, tree=[math.nan, 2**70, math.inf]))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    manifest = json.loads(Path(place).read_text(), parse_constant=refuse)
    assert (manifest["manyhands_checkpoint"], manifest["round"]) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tree": [object()]}, "state.0"),
        ({"tree": torch.zeros(2, device="meta")}, "meta"),
        ({"about": {"x": torch.ones(1)}}, "about.x is a tensor"),
        ({"tree": "x" * (65 << 20)}, "bytes of JSON"),
    ],
    ids=["object", "meta", "about", "too much"],
)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(wrong, words, url):
    store = Store(url)
    store.save(checkpoint_of(1))
    with pytest.raises(UsageError, match=words):
        store.save(checkpoint_of(2, **wrong))
    assert [place.round for place in store.places()] == [1]


def test_a_round_that_is_none(url):
    with pytest.raises(UsageError, match="round -1"):
        Store(url).save(checkpoint_of(-1))


@pytest.mark.parametrize("keep", [0, -1])
def test_one_is_kept_at_least(keep, url):
    with pytest.raises(UsageError, match="keep"):
        Store(url, keep=keep)


@pytest.mark.parametrize("url", ["nowhere://user:hunter2@x/y", "nowhere://x/y?token=hunter2"])
def test_a_url_that_nobody_knows(url):
    with pytest.raises(UsageError, match="nowhere://") as caught:
        Store(url)
    assert "hunter2" not in str(caught.value)


def trained(steps, resume_at, url):
    """A few steps of training, with or without going through a checkpoint in between."""

    def fresh():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        }

    parts = fresh()
    for step in range(steps):
        if step == resume_at:
            tree = {name: part.state_dict() for name, part in parts.items()}
            Store(url).save(checkpoint_of(step, tree=tree))
            parts, found = fresh(), Store(url).load()
            for name, part in parts.items():
                part.load_state_dict(found.checkpoint.tree[name])
        torch.manual_seed(step)
        parts["optimizer"].zero_grad()
        parts["model"](torch.randn(16, 4)).pow(2).mean().backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
    return bits({name: dict(part.state_dict()) for name, part in parts.items()})


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    # torch makes this folder with the first optimizer.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert trained(6, 3, tmp_path / "checkpoints") == trained(6, None, tmp_path)
