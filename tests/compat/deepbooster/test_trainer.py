"""What a trainer refuses before it dials anything; the warning about brokers without TLS."""

from __future__ import annotations

import resource
import warnings

import pytest
import torch
from torch import nn

from manyhands.compat import deepbooster
from manyhands.compat.deepbooster.launcher import split
from manyhands.compat.deepbooster.learner import Learner
from manyhands.compat.deepbooster.schedule import shorten
from manyhands.compat.deepbooster.trainer import _path_in
from manyhands.core.errors import AddressError, UsageError


def trainer(**changed):
    model = nn.Linear(2, 1)
    given = {
        "model": model,
        "criterion": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
        "device": torch.device("cpu"),
        "n_epoch": 1,
        "ignition_queue": "start_1",
        "my_queue": "test1",
        "trainers_queues": ["test1", "test2"],
        "url_parameters": "amqp://user:secret@127.0.0.1:5672",
        "chunk_path": "./chunk1.jsonl",
        "transformer": torch.Tensor,
        "apply_transformer_to_label": True,
    }
    return deepbooster.Trainer(**given | changed)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"my_queue": "test3"}, "not among trainers_queues"),
        ({"trainers_queues": ["test1", "test1"]}, "comes twice"),
        ({"ignition_queue": "test2"}, "needs two queues"),
        ({"ignition_queue": "amq.topic"}, "broker's own"),
        ({"my_queue": "", "trainers_queues": [""]}, "cannot name a queue"),
        ({"my_queue": "ab", "trainers_queues": "ab"}, "a list of names"),
        ({"n_epoch": 0}, "at least 1"),
        ({"n_epoch": "3"}, "n_epoch='3'"),
        ({"n_epoch": 2.5}, r"n_epoch=2\.5"),
        ({"model": nn.Linear(2, 1).requires_grad_(False)}, None),
        ({"url_parameters": "hub://127.0.0.1/run"}, "is no broker"),
    ],
)
def test_what_cannot_be(changed, text):
    if text is None:  # what is trained is what the optimizer has, wherever it is
        trainer(**changed)
        return
    with pytest.raises(UsageError, match=text):
        trainer(**changed)


def test_one_name_is_no_list_of_queues():
    with pytest.raises(UsageError, match="ignition_queues='ab'"):
        deepbooster.Launcher("ab", "amqp://user:secret@127.0.0.1:5672")


@pytest.mark.parametrize("body", [b"x" * 300, b"/a" * 3000, b"\xff", b"\0", b"", b"/", b"{}"])
def test_a_message_that_is_no_path(body):
    with pytest.raises(deepbooster.ChunkError, match="the message in start_1 is no path"):
        _path_in(body, "start_1")


def test_optimizers_that_have_gone_different_ways_do_not_fit_together():
    """Equal weights and gradients would not stay equal with them."""

    def settings(steps, lr=0.1):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        for _ in range(steps):
            model(torch.rand(3, 2)).sum().backward()
            optimizer.step()
        return Learner(model, nn.MSELoss(), optimizer, "cpu").settings(1)

    assert settings(2) == settings(2)
    assert len({settings(0), settings(2), settings(3), settings(2, torch.tensor(0.2))}) == 4
    assert settings(0, torch.tensor(0.2)) != settings(0, torch.tensor(0.1))


def test_chunks_that_cannot_be_written(tmp_path):
    data = tmp_path / "all.jsonl"
    data.write_bytes(b'{"input": 1, "label": 1}\n' * 2000)
    (tmp_path / "0.chunk").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(deepbooster.ChunkError, match=r"cannot be written to .*too large"):
            split(data, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0.chunk", "all.jsonl"]
    assert (tmp_path / "0.chunk").read_text() == "old"


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_data_that_a_chunk_leads_to_are_not_overwritten(tmp_path, link):
    data, chunk = tmp_path / "all.jsonl", tmp_path / "1.chunk"
    lines = b'{"input": 1, "label": 1}\n' * 3
    chunk.write_bytes(lines)
    getattr(data, link)(chunk)
    with pytest.raises(UsageError, match="a chunk of itself"):
        split(data, 2)
    assert data.read_bytes() == lines
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["1.chunk", "all.jsonl"]
    with pytest.raises(deepbooster.ChunkError, match="No such file"):
        split(tmp_path / "nothing", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "cuda:7"])
def test_a_gpu_that_is_not_there(device):
    with pytest.raises(deepbooster.DeviceMissing, match="is not on this machine") as caught:
        trainer(device=device)
    assert "device='cpu'" in caught.value.hint


def test_a_broker_without_tls_elsewhere_is_warned_of():
    with pytest.warns(UserWarning, match="in the clear.*amqps://") as caught:
        trainer(url_parameters="amqp://user:secret@35.222.31.138:5672")
    assert "secret" not in str(caught[0].message)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "url",
    ["amqps://user:secret@35.222.31.138", "amqp://user:secret@localhost:5672/vhost"],
)
def test_others_are_not(url):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(url_parameters=url)
    assert caught == []


def test_a_bad_address_shows_no_password():
    with pytest.raises(AddressError) as caught:
        trainer(url_parameters="amqp://user:se/cr/et@127.0.0.1:port")
    assert "cr" not in str(caught.value).replace("characters", "")


@pytest.mark.parametrize("num", [1, 3, 100, 200])
def test_paths_of_all_trainers_fit_into_a_note(num):
    short = shorten("/ä" * 500 + "/chunk.jsonl", num)
    assert short.endswith(".jsonl")
    assert len(short.encode()) * num <= 9000
