"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manyhands.observe import MissingExtra, TensorBoard, adapt


def write(folder, steps, value=0.5, name="train/loss"):
    logger = TensorBoard(folder)
    for step in steps:
        logger.log_metrics({name: value}, step)
    logger.finalize("success")
    logger.finalize("success")


def scalars(folder, name="train/loss"):
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_what_is_written_is_read(tmp_path):
    logger = TensorBoard(tmp_path / "new")
    logger.log_hyperparams({"lr": 0.1, "clip": None, "betas": (0.9, 0.99)})
    logger.log_metrics({"train/loss": 0.5, "lr": 0.25}, 0)
    assert scalars(tmp_path / "new") == [(0, 0.5)]  # at once
    logger.log_metrics({"train/loss": float("inf"), "val/loss": 0.75}, 1)
    logger.finalize("success")
    assert scalars(tmp_path / "new") == [(0, 0.5), (1, float("inf"))]
    assert scalars(tmp_path / "new", "val/loss") == [(1, 0.75)]
    assert scalars(tmp_path / "new", "lr") == [(0, 0.25)]
    found = EventAccumulator(str(tmp_path / "new"))
    found.Reload()
    (data,) = (found.summary_metadata["_hparams_/session_start_info"].plugin_data.content,)
    assert b"betas" in data


IMPORTS = """
import sys
from manyhands.observe import {name}
made = {name}({where!r})
made.finalize("success")
assert {package!r} not in sys.modules
"""


@pytest.mark.parametrize(("name", "package"), [("TensorBoard", "tensorboard"), ("Wandb", "wandb")])
def test_a_package_is_loaded_with_the_first_row(tmp_path, name, package):
    program = IMPORTS.format(name=name, package=package, where=str(tmp_path / "p"))
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_file_before_the_first_row(tmp_path):
    TensorBoard(tmp_path / "new").finalize("success")
    assert not (tmp_path / "new").exists()


def test_steps_never_go_back(tmp_path):
    write(tmp_path, [0, 1, 2, 1, 2, 3])
    assert [step for step, _ in scalars(tmp_path)] == [0, 1, 2, 3]


def test_resumed_it_adds_what_is_new(tmp_path):
    write(tmp_path, range(5))
    write(tmp_path, range(3, 7), value=0.25)
    assert scalars(tmp_path) == [*((step, 0.5) for step in range(5)), (5, 0.25), (6, 0.25)]


def test_a_training_whose_steps_are_there_already_is_warned_once(tmp_path, caplog):
    """Nothing else would say that a second one from scratch leaves no trace."""
    write(tmp_path, [0, 1, 2, 1])
    assert not caplog.records  # a step of its own that comes again is none of another training
    write(tmp_path, range(4), value=0.25)
    (record,) = caplog.records
    assert record.message.startswith(f"{tmp_path} has rows up to step 2, which stay as they are")


def test_resumed_after_a_row_that_was_cut_off(tmp_path):
    write(tmp_path, range(3))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    write(tmp_path, range(1, 5), value=0.25)
    assert scalars(tmp_path) == [(0, 0.5), (1, 0.5), (2, 0.25), (3, 0.25), (4, 0.25)]


@pytest.fixture(scope="module")
def torch_utils():
    """Loaded before the leak check looks."""
    return import_module("torch.utils.tensorboard")


def test_a_writer_of_torch(torch_utils, tmp_path):
    with torch_utils.SummaryWriter(tmp_path) as writer:
        logger = adapt(writer)
        logger.log_hyperparams({"lr": 0.1})
        for step in (0, 1, 0, 2):
            logger.log_metrics({"train/loss": 0.5}, step)
        logger.finalize("success")
        assert scalars(tmp_path) == [(0, 0.5), (1, 0.5), (2, 0.5)]
        writer.add_scalar("mine", 1.0, 0)  # it is still the user's
    assert scalars(tmp_path, "mine") == [(0, 1.0)]


def test_a_writer_of_a_process_that_was_resumed(torch_utils, tmp_path, caplog):
    """Its folder says how far it was; the user's own values there have steps of their own."""
    with torch_utils.SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("mine", 1.0, 1000)
        logger = adapt(writer)
        for step in range(5):
            logger.log_metrics({"train/loss": 0.5}, step)
    with torch_utils.SummaryWriter(str(tmp_path)) as writer:
        logger = adapt(writer)
        for step in range(3, 7):
            logger.log_metrics({"train/loss": 0.25}, step)
    found = sorted(scalars(tmp_path))  # its files have the same second in their names
    assert found == [*((step, 0.5) for step in range(5)), (5, 0.25), (6, 0.25)]
    assert len(caplog.records) == 1


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match=r"pip install 'manyhands\[tensorboard\]'"):
        TensorBoard(tmp_path)
