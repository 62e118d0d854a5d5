"""Damaged checkpoints: named, with the reason, and the one before is used. Never a crash."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest
import torch
import xxhash
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from manyhands.checkpoint.store import Store
from manyhands.core.errors import CheckpointError
from tests.checkpoint.kit import checkpoint_of, rounds, same


@pytest.fixture
def damaged(tmp_path):
    """Store, manifest and tensor file of round 2; round 1 is there and stays whole."""
    store = Store(tmp_path)
    store.save(checkpoint_of(1))
    manifest = Path(store.save(checkpoint_of(2)))
    return store, manifest, manifest.with_suffix(".safetensors")


def reason_of(store, place):
    """Why this one was passed over; the one before it must have been found."""
    found = store.load()
    assert same(found.checkpoint, checkpoint_of(1))
    ((named, reason),) = found.broken
    assert named == str(place)
    return reason


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


def test_a_tensor_file_cut_short(damaged):
    store, manifest, tensors = damaged
    whole = tensors.read_bytes()
    for size in (0, 4, 8, 100, len(whole) - 1):
        tensors.write_bytes(whole[:size])
        assert reason_of(store, manifest) == f"its tensor file has {size} of {len(whole)} bytes"
    tensors.write_bytes(whole + b"\0")
    assert "bytes" in reason_of(store, manifest)


def test_links_that_lead_nowhere_hide_nothing(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "latest").symlink_to("latest")  # round and round
    (tmp_path / "gone").symlink_to("nowhere")
    store.save(checkpoint_of(1))
    assert same(store.load().checkpoint, checkpoint_of(1))


def test_a_tensor_file_with_a_flipped_bit(damaged):
    store, manifest, tensors = damaged
    whole = tensors.read_bytes()
    for position in (*range(0, len(whole), 23), len(whole) - 1):
        tensors.write_bytes(flipped(whole, position))
        reason = reason_of(store, manifest)
        assert "header of its tensor file" in reason or "tensor file was changed" in reason


def test_a_manifest_cut_short_or_with_a_flipped_bit(damaged):
    store, manifest, _ = damaged
    whole = manifest.read_bytes()
    for position in range(0, len(whole), 5):
        manifest.write_bytes(whole[:position])
        assert "manifest" in reason_of(store, manifest)
        manifest.write_bytes(flipped(whole, position))
        assert reason_of(store, manifest)


def test_a_missing_file(damaged):
    store, manifest, tensors = damaged
    data = tensors.read_bytes()
    tensors.unlink()
    assert reason_of(store, manifest) == "its tensor file is missing"
    tensors.write_bytes(data)
    manifest.unlink()
    assert "no manifest" in reason_of(store, manifest)


def test_files_of_another_checkpoint(damaged):
    store, manifest, tensors = damaged
    (first,) = (f for f in tensors.parent.glob("round-000000000001*.json"))
    tensors.write_bytes(first.with_suffix(".safetensors").read_bytes())
    assert "header" in reason_of(store, manifest) or "changed" in reason_of(store, manifest)
    manifest.write_bytes(first.read_bytes())
    assert reason_of(store, manifest) == "its manifest is of round 1"


def test_all_of_them_broken(damaged):
    store, manifest, tensors = damaged
    for file in tensors.parent.glob("*.safetensors"):
        file.write_bytes(b"")
    found = store.load()
    assert (found.checkpoint, found.place) == (None, None)
    assert found.broken[0].place == str(manifest)
    assert len(found.broken) == 2


def test_a_broken_one_that_was_asked_for_is_named(damaged):
    store, manifest, tensors = damaged
    tensors.write_bytes(b"")
    assert [broken.place for broken in store.load(2).broken] == [str(manifest)]
    assert store.load(2).checkpoint is None
    assert store.load(1).broken == []


def test_a_newer_format_is_named_as_such(damaged):
    store, manifest, _ = damaged
    manifest.write_text('{"manyhands_checkpoint": 7, "all": ["else", "is", "new"]}')
    assert reason_of(store, manifest) == (
        "it is of format 7, this release reads up to 1 (update manyhands)"
    )


DEEP = "what is too deep to be made as a value"


def forge(manifest, deep="", **changes):
    """A manifest that lies with a digest that does not; `deep` is the text that DEEP stands for."""
    body = json.loads(manifest.read_text())
    del body["manifest_digest"]
    for key, value in changes.items():
        body[key] = value(body[key]) if callable(value) else value

    def written():
        return json.dumps(body, separators=(",", ":")).replace(f'"{DEEP}"', deep)

    body["manifest_digest"] = xxhash.xxh3_128_hexdigest(written().encode())
    manifest.write_text(written())


def entry(name="state.model.weight", dtype="float32", shape=(64, 3)):
    return lambda entries: [[name, [dtype, list(shape)]], *entries[1:]]


HUGE = 2**40
LIES = {
    "a size": {"file": lambda file: {**file, "size": HUGE}},
    "a negative size": {"file": lambda file: {**file, "size": -1}},
    "a size beyond 64 bits": {"file": lambda file: {**file, "size": 2**80}},
    "a size that is a text": {"file": lambda file: {**file, "size": "12"}},
    "another digest": {"file": lambda file: {**file, "digest": "0" * 32}},
    "no digest": {"file": lambda file: {"size": file["size"]}},
    "a huge shape": {"tensors": entry(shape=(HUGE,))},
    "a shape beyond memory": {"tensors": entry(shape=(2**62, 2**62))},
    "a shape beyond 64 bits": {"tensors": entry(shape=(2**70,))},
    "a negative shape": {"tensors": entry(shape=(-64, -3))},
    "empty but huge": {"tensors": entry(shape=(0, 2**62, 2**62))},
    "many dimensions": {"tensors": entry(shape=(1,) * 65)},
    "a float as shape": {"tensors": entry(shape=(64.5, 3))},
    "as many bytes, otherwise": {"tensors": entry(shape=(3, 64))},
    "an unknown dtype": {"tensors": entry(dtype="quaternion")},
    "a dtype that is code": {"tensors": entry(dtype="__import__('os')")},
    "another name": {"tensors": entry(name="state.model.weighs")},
    "a name twice": {"tensors": lambda entries: [entries[1], *entries[1:]]},
    "one tensor too few": {"tensors": lambda entries: entries[1:]},
    "no tensors": {"tensors": None},
    "an unknown tensor": {"state": ["tensor", 3]},
    "a tensor used twice": {"state": ["list", ["tensor", 0], ["tensor", 0], ["tensor", 1]]},
    "a state of no kind": {"state": ["eval", "1 + 1"]},
    "about nothing": {"about": ["list"]},
    "about a tensor": {"about": ["tensor", 0]},
    "a round that is none": {"round": -1},
    "another round": {"round": 3},
    "a chain that is none": {"chain": "not base 64!"},
    "an unknown key": {"extra": 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(lie, damaged):
    store, manifest, _ = damaged
    forge(manifest, **LIES[lie])
    assert "manifest was changed" not in reason_of(store, manifest)


@pytest.mark.parametrize("depth", [65, 500, 800, 950])
def test_a_manifest_that_is_nested_deeply(depth, damaged):
    store, manifest, _ = damaged
    whole = manifest.read_text()
    for opening in ('["list",', '["what",', "[[],", "["):
        manifest.write_text(whole)  # what is forged is read before, and no test is so deep
        forge(manifest, deep=opening * depth + "1" + "]" * depth, state=DEEP)
        assert reason_of(store, manifest)


def test_a_manifest_that_does_not_lie(damaged):
    """The forger's own work is not what was found above."""
    store, manifest, _ = damaged
    forge(manifest)
    assert same(store.load().checkpoint, checkpoint_of(2))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{}",
        b'{"manyhands_checkpoint": 1}',
        b'{"manyhands_checkpoint": "1"}',
        b'{"manyhands_checkpoint": null, "manifest_digest": null}',
        b'{"manyhands_checkpoint": NaN}',
        b'{"manyhands_checkpoint": 1, "manifest_digest": "", "x": NaN}',
        b'{"manyhands_checkpoint": 1e999}',
        b'{"manyhands_checkpoint": ' + b"9" * 5000 + b"}",
        b"[" * 1_000_000,
        b'{"manyhands_checkpoint": 1, "manifest_digest": "", "x": '
        + b"[" * 900
        + b"]" * 900
        + b"}",
        b"\0" * ((64 << 20) + 1),
    ],
    ids=lambda text: repr(text[:60]),
)
def test_a_manifest_that_is_none(text, damaged):
    store, manifest, _ = damaged
    manifest.write_bytes(text)
    assert "manifest" in reason_of(store, manifest)


def reseal(manifest, tensors, data):
    """Another tensor file, with the manifest that fits it."""
    tensors.write_bytes(data)
    seal = {"size": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
    forge(manifest, file=seal)


def test_a_tensor_file_whose_header_lies(damaged):
    store, manifest, tensors = damaged
    whole = tensors.read_bytes()
    for lie in (
        whole.replace(b"[0,768]", b"[0,769]"),
        whole.replace(b'"F32"', b'"I32"'),
        (2**62).to_bytes(8, "little") + whole[8:],
        b"\0" * 8 + whole[8:],
    ):
        assert lie != whole
        reseal(manifest, tensors, lie)
        assert "header" in reason_of(store, manifest)


def test_a_tensor_file_with_fewer_bytes_than_its_tensors(damaged):
    """Header, size and digest are in order; memory is not taken for what is not there."""
    store, manifest, tensors = damaged
    reseal(manifest, tensors, tensors.read_bytes()[:-500])
    assert reason_of(store, manifest) == "its tensors make a file of 1080 bytes, it says 580"


def test_a_bool_that_is_neither(tmp_path):
    """torch may do anything with such a value."""
    store = Store(tmp_path)
    store.save(checkpoint_of(1))
    manifest = Path(store.save(checkpoint_of(2, tree=[torch.tensor([True, False])])))
    tensors = manifest.with_suffix(".safetensors")
    reseal(manifest, tensors, tensors.read_bytes()[:-1] + b"\x02")
    assert "bool" in reason_of(store, manifest)


def test_a_broken_one_is_replaced_when_its_round_comes_again(damaged):
    store, _, tensors = damaged
    tensors.write_bytes(b"")
    store.save(checkpoint_of(2))
    assert rounds(store) == [1, 2]
    assert same(store.load().checkpoint, checkpoint_of(2))
    assert store.load().broken == []


class Flaky(MemoryFileSystem):
    """An object store that fails with an error of its own, as those behind URLs do."""

    protocol = "flaky"
    store = {}  # noqa: RUF012
    failing = set()  # noqa: RUF012

    class Failure(Exception):
        pass

    def fail(self, verb, path):
        if verb in self.failing or (verb, path.rpartition(".")[2]) in self.failing:
            raise self.Failure(f"{verb} at flaky://user:hunter2@host failed")

    def _open(self, path, mode="rb", **options):
        self.fail(mode, path)
        file = super()._open(path, mode, **options)
        return FlakyFile(self, file) if mode == "wb" else file

    def ls(self, path, detail=True, **options):
        self.fail("ls", path)
        return super().ls(path, detail=detail, **options)

    def pipe_file(self, path, value, **options):
        super().pipe_file(path, value[: len(value) // 2])
        self.fail("put", path)
        return super().pipe_file(path, value)

    def rm_file(self, path):
        self.fail("rm", path)
        return super().rm_file(path)


class FlakyFile:
    def __init__(self, system, file: MemoryFile):
        self._system, self._file = system, file

    def write(self, data):
        self._file.write(data[: len(data) // 2])
        self._system.fail("write", "")
        self._file.write(data[len(data) // 2 :])

    def close(self):
        self._system.fail("close", "")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def flaky(monkeypatch):
    """A store on it, and the set of verbs that fail."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "store", {})
    monkeypatch.setattr(Flaky, "failing", set())
    return Store("flaky://bucket/run", keep=1), Flaky.failing


@pytest.mark.parametrize("verb", ["wb", "write", "close", "put", "ls"])
def test_a_url_that_cannot_be_written(verb, flaky):
    store, failing = flaky
    store.save(checkpoint_of(1))
    failing.add(verb)
    with pytest.raises(CheckpointError, match=r"flaky://bucket/run.* cannot be") as caught:
        store.save(checkpoint_of(2))
    assert "Failure" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    failing.clear()
    assert [place.round for place in store.places()] == [1]
    assert same(store.load().checkpoint, checkpoint_of(1))


def test_a_url_where_even_the_rest_cannot_be_removed(flaky):
    store, failing = flaky
    store.save(checkpoint_of(1))
    failing.update({"put", "rm"})
    with pytest.raises(CheckpointError, match="cannot be written"):
        store.save(checkpoint_of(2))
    failing.clear()
    found = store.load()
    assert same(found.checkpoint, checkpoint_of(1))
    assert "manifest" in found.broken[0].reason


def test_a_file_that_cannot_be_read_is_passed_over(flaky):
    store, failing = flaky
    store.save(checkpoint_of(1))
    failing.add(("rb", "safetensors"))
    ((place, reason),) = store.load().broken
    assert place.startswith("flaky://bucket/run/round-000000000001-")
    assert "cannot be read: Failure" in reason
    assert "hunter2" not in reason


def test_a_folder_that_cannot_be_listed_is_an_error(flaky):
    store, failing = flaky
    failing.add("ls")
    with pytest.raises(CheckpointError, match="cannot be listed"):
        store.load()


def test_old_ones_that_cannot_be_removed_do_not_fail_the_save(flaky, caplog):
    store, failing = flaky
    store.save(checkpoint_of(1))
    failing.add("rm")
    store.save(checkpoint_of(2))
    assert same(store.load().checkpoint, checkpoint_of(2))
    assert "an old checkpoint stays" in caplog.text
    failing.clear()
    store.save(checkpoint_of(3))
    assert rounds(store) == [3]


def test_one_that_is_removed_while_it_is_read_is_not_called_broken(flaky, monkeypatch):
    store, _ = flaky
    store.save(checkpoint_of(1))
    others = iter([checkpoint_of(2)])

    def save_another(self, verb, path):
        if verb == "rb" and (other := next(others, None)):
            store.save(other)

    monkeypatch.setattr(Flaky, "fail", save_another)
    found = store.load()
    assert same(found.checkpoint, checkpoint_of(2))
    assert found.broken == []


def test_behind_a_url_only_old_drafts_are_cleared(flaky):
    """There is no lock that could tell whether its writer is alive."""
    store, failing = flaky
    failing.update({"put", "rm"})
    with pytest.raises(CheckpointError):
        store.save(checkpoint_of(1))
    failing.clear()
    manifest, tensors = sorted(Flaky.store)
    del Flaky.store[manifest]
    store.save(checkpoint_of(2))
    assert tensors in Flaky.store
    Flaky.store[tensors].modified = datetime.now(UTC) - timedelta(days=2)
    store.save(checkpoint_of(3))
    assert tensors not in Flaky.store
