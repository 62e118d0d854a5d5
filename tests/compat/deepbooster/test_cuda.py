"""A trainer on a GPU and one on the CPU: what travels, and that they end with equal weights."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from manyhands.collectives.mail import Mail
from manyhands.compat.deepbooster.dataset import Dataset
from manyhands.compat.deepbooster.learner import Learner
from manyhands.compat.deepbooster.training import Training
from manyhands.links.base import open_link
from tests.compat.deepbooster.crew import random_lines, write_chunk

pytestmark = pytest.mark.usefixtures("started_gpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_devices(tmp_path, device):
    """The engine is the same over every link; this one needs no broker."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    names, devices = ["t0", "t1"], ["cpu", device]
    results = {}

    def train(k):
        torch.manual_seed(k)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        learner = Learner(model, nn.MSELoss(), optimizer, devices[k])
        chunk = write_chunk(tmp_path / f"{k}.jsonl", random_lines(k, 3))
        dataset = Dataset(chunk, torch.Tensor, True)
        mail = Mail()
        link = open_link("local:///devices", name=names[k], place=mail)
        training = Training(link, mail, learner, dataset, names=names, n_epoch=5)
        try:
            results[k] = training.run(), model, optimizer
        finally:
            training.close()
            dataset.close()

    threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (report, first, _), (other, second, optimizer) = results[0], results[1]
    assert report == other
    assert report.steps == 15
    assert {p.device.type for p in second.parameters()} == {device}
    assert {s["exp_avg"].device.type for s in optimizer.state.values()} == {device}
    for left, right in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right.cpu(), rtol=1e-5, atol=1e-6)
