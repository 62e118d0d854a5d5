"""A trainer in this process: how it hears of what goes wrong."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyhands.collectives.mail import Mail
from manyhands.compat.deepbooster import Dataset, Trainer, TrainingBroken
from manyhands.compat.deepbooster.learner import Learner
from manyhands.compat.deepbooster.training import Training
from manyhands.core.errors import UsageError
from manyhands.links.base import LinkSettings, dial, new_peer
from manyhands.links.hub import Hub
from tests.compat.deepbooster.crew import PATIENCE_S, random_lines, write_chunk

pytestmark = pytest.mark.usefixtures("broker")  # before the leak check looks


def learner():
    model = nn.Linear(3, 1)
    return Learner(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), "cpu")


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = nn.Linear(3, 1)
    with pytest.raises(UsageError, match="LBFGS calls its closure several times") as caught:
        Learner(model, nn.MSELoss(), torch.optim.LBFGS(model.parameters()), "cpu")
    assert "Adam or SGD say" in str(caught.value)


def test_an_error_of_the_users_code_names_the_line(tmp_path):
    good, bad = random_lines(1, 2)
    path = write_chunk(tmp_path / "chunk.jsonl", [good, ([[1.0], [2.0, 3.0]], bad[1])])
    dataset, mail = Dataset(path, torch.Tensor, apply_transformer_to_label=True), Mail()
    with Hub("127.0.0.1:0") as hub:
        link = dial(replace(hub.near, run="r"), new_peer("a"), LinkSettings(), mail)
        training = Training(link, mail, learner(), dataset, names=["a"], n_epoch=1)
        try:
            with pytest.raises(ValueError, match="expected sequence") as caught:
                training.run()
        finally:
            training.close()
            dataset.close()
    assert caught.value.__notes__ == [f"at {path}:2"]


def test_who_waits_for_others_hears_that_its_link_has_ended(tmp_path):
    """Else it would wait for ever: nobody can come, and nobody tells it."""
    dataset = Dataset(write_chunk(tmp_path / "chunk.jsonl", random_lines(1, 3)), torch.Tensor)
    mail, errors = Mail(), list[BaseException]()
    with Hub("127.0.0.1:0") as hub:
        link = dial(replace(hub.near, run="r"), new_peer("a"), LinkSettings(outage_s=0.5), mail)
        training = Training(link, mail, learner(), dataset, names=["a", "b"], n_epoch=1)

        def run() -> None:
            try:
                training.run()
            except TrainingBroken as error:
                errors.append(error)

        waiting = threading.Thread(target=run, daemon=True)
        waiting.start()
    waiting.join(PATIENCE_S / 4)
    heard = not waiting.is_alive()
    training.close()
    dataset.close()
    assert heard
    assert "with 3 lines to come" in str(errors[0])


def test_momentum_of_an_earlier_training_is_made_equal_too(tmp_path):
    """One of them had missed steps of it: weights would part again with the first step."""
    learners, errors = [], list[BaseException]()
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.rand(2, 3)).sum().backward()
        optimizer.step()
        learners.append((model, Learner(model, nn.MSELoss(), optimizer, "cpu")))
    names = ["a", "b"]

    def train(hub: Hub, place: int) -> None:
        path = write_chunk(tmp_path / names[place], random_lines(place, 3))
        dataset, mail = Dataset(path, torch.Tensor, apply_transformer_to_label=True), Mail()
        link = dial(replace(hub.near, run="r"), new_peer(names[place]), LinkSettings(), mail)
        training = Training(link, mail, learners[place][1], dataset, names=names, n_epoch=1)
        try:
            training.run()
        except TrainingBroken as error:
            errors.append(error)
        finally:
            training.close()
            dataset.close()

    with Hub("127.0.0.1:0") as hub:
        threads = [threading.Thread(target=train, args=(hub, k), daemon=True) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert errors == []
    first, second = (model for model, _ in learners)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_an_optimizer_that_cannot_say_its_state(broker, tmp_path):
    """Its error is the user's, and nothing is left behind: not the link, above all."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    path = write_chunk(tmp_path / "chunk.jsonl", random_lines(1, 1))
    trainer = Trainer(
        model,
        nn.MSELoss(),
        optimizer,
        "cpu",
        n_epoch=1,
        ignition_queue="start-of-none",
        my_queue="none",
        trainers_queues=["none"],
        url_parameters=broker.url(),
    )
    optimizer.register_state_dict_pre_hook(lambda _: 1 / 0)
    dataset = Dataset(path, torch.Tensor)
    with pytest.raises(ZeroDivisionError):
        trainer._train(dataset)
    dataset.close()
