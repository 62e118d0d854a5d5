"""Whatever somebody logs with."""

from __future__ import annotations

import csv
import logging
import math
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manyhands.core.errors import UsageError
from manyhands.observe import Console, Csv, Desk, JsonLines, Records, TensorBoard, Wandb, adapt
from manyhands.observe.events import Hears


@pytest.mark.parametrize("make", [Console, Records, lambda: Desk([])])
def test_a_logger_is_one(make):
    logger = make()
    assert adapt(logger) is logger
    logger.finalize("success")


@pytest.mark.parametrize("make", [Csv, JsonLines, TensorBoard])
def test_all_of_ours_are(make, tmp_path):
    logger = make(tmp_path / "log")
    assert adapt(logger) is logger


def test_wandb_is_and_loads_nothing_yet():
    logger = Wandb("project")
    assert adapt(logger) is logger
    logger.finalize("success")


@pytest.fixture(scope="module")
def lightning():
    """Loaded before the leak check looks: torch makes itself a folder."""
    import_module("torch.utils.tensorboard")
    return import_module("lightning_fabric.loggers")


def test_one_of_lightnings(lightning, tmp_path):
    theirs = lightning.CSVLogger(tmp_path, name="run", version=0)
    assert adapt(theirs) is theirs
    with Desk([theirs]) as desk:
        desk.log_hyperparams({"lr": 0.1})  # it refuses them, which is no failure
        desk.log_metrics({"train/loss": 0.5}, 0)
        desk.log_metrics({"train/loss": 0.25}, 1)
    assert [(count.failed, count.dropped) for count in desk.counts] == [(0, 0)]
    with (tmp_path / "run" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = [(int(row["step"]), float(row["train/loss"])) for row in csv.DictReader(file)]
    assert rows == [(0, 0.5), (1, 0.25)]


@pytest.mark.parametrize("prefix", ["", "mine"])
def test_lightnings_writer_of_a_process_that_was_resumed(lightning, tmp_path, caplog, prefix):
    """Its folder says how far it was, as that of a SummaryWriter does."""
    for steps, value in ((range(5), 0.5), (range(3, 7), 0.25)):
        writer = lightning.TensorBoardLogger(tmp_path, name="run", version=0, prefix=prefix)
        logger = adapt(writer)
        logger.log_hyperparams({"lr": 0.1})
        for step in steps:
            logger.log_metrics({"train/loss": value}, step)
        logger.finalize("success")
    found = EventAccumulator(str(tmp_path / "run" / "version_0"))
    found.Reload()
    name = "mine-train/loss" if prefix else "train/loss"
    rows = sorted((event.step, event.value) for event in found.Scalars(name))
    assert rows == [*((step, 0.5) for step in range(5)), (5, 0.25), (6, 0.25)]
    assert len(caplog.records) == 1


def test_one_of_pythons_logging(caplog):
    caplog.set_level(logging.DEBUG)
    logger = adapt(logging.getLogger("mine"))
    logger.log_metrics({"train/loss": 0.5}, 3)
    assert [(r.name, r.getMessage()) for r in caplog.records] == [
        ("mine", "step 3  train/loss 0.5")
    ]


class Tracker:
    """As a run of trackio is, or one that somebody has written."""

    def __init__(self):
        self.rows, self.config = [], {}

    def log(self, values, step=None):
        self.rows.append((values, step))


def test_what_has_log_with_a_step():
    tracker = Tracker()
    logger = adapt(tracker)
    logger.log_hyperparams({"lr": 0.1, "betas": (0.9, 0.99)})
    for step in (0, 1, 1, 0, 2):
        logger.log_metrics({"loss": 0.5}, step)
    logger.finalize("success")
    assert tracker.rows == [({"loss": 0.5}, 0), ({"loss": 0.5}, 1), ({"loss": 0.5}, 2)]
    assert tracker.config == {"lr": 0.1, "betas": "(0.9, 0.99)"}


def test_without_a_config():
    class Bare:
        def log(self, values, **more):
            self.got = values, more

    logger = adapt(bare := Bare())
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 0.5}, 4)
    assert bare.got == ({"loss": 0.5}, {"step": 4})


class Writer:
    """As a SummaryWriter is."""

    def __init__(self):
        self.calls = []

    def add_scalar(self, tag, value, global_step):
        self.calls.append((tag, value, global_step))

    def add_text(self, tag, text):
        self.calls.append((tag, text))

    def flush(self):
        self.calls.append("flush")


def test_what_has_add_scalar():
    logger = adapt(writer := Writer())
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"a": 1.0, "b": 2.0}, 3)
    logger.log_metrics({"a": 5.0}, 2)
    logger.finalize("success")
    assert writer.calls == [
        ("hyperparams", '{\n  "lr": 0.1\n}'),
        ("a", 1.0, 3),
        ("b", 2.0, 3),
        "flush",
    ]


def test_a_function_of_a_row_and_its_step():
    got = []
    for call in (lambda row, step: got.append((row, step)), lambda row, *, step: got.append(step)):
        logger = adapt(call)
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({"a": 1.0}, 3)
        logger.log_metrics({"a": 1.0}, 3)  # it has been
        logger.finalize("success")
    assert got == [({"a": 1.0}, 3), 3]


def test_print(capsys):
    adapt(print).log_metrics({"a": 1.0}, 3)
    assert capsys.readouterr().out == "{'a': 1.0} 3\n"


def test_the_module_itself_before_it_has_a_run():
    module = ModuleType("wandb")
    module.run, module.log, module.define_metric = None, print, print
    with pytest.raises(UsageError, match="has no run yet"):
        adapt(module)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (None, "a NoneType is no logger"),
        ("log.jsonl", "a str is no logger"),
        (object(), "a object is no logger"),
        (math, "a module is no logger"),  # math.log is something else
        (Console, "Console is a class"),
        ([].append, "cannot be called with"),
        (lambda: None, "cannot be called with"),
    ],
    ids=["None", "a string", "an object", "a module", "a class", "a method", "a function"],
)
def test_what_is_none(thing, words):
    with pytest.raises(UsageError, match=words) as caught:
        adapt(thing)
    assert caught.value.hint


@pytest.mark.parametrize(
    "kind",
    ["function", "by name", "log", "writer", "run", "logger", "logger that hears", "logging"],
)
def test_a_place_that_has_rows_already_is_sent_what_comes_after_them(kind, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    rows, others = [], []

    class Place:
        def log(self, metrics, step):
            rows.append(step)

        def add_scalar(self, name, value, step):
            rows.append(step)

    class Theirs(logging.Logger):
        def debug(self, *args):
            pass

        def log(self, level, form, text):
            rows.append(int(text.split()[1]))

    class Own:
        def log_metrics(self, metrics, step):
            rows.append(step)

        def log_hyperparams(self, params):
            others.append(params)

        def finalize(self, status):
            others.append(status)

    class Hearing(Own):
        def log_event(self, event):
            others.append(event)

    def by_name(metrics, *, step):
        rows.append(step)

    class Run:
        summary, config, id = {}, {}, "7"
        settings = SimpleNamespace(wandb_dir=str(tmp_path))

        def define_metric(self, *_, **more):
            pass

        def log(self, values):
            rows.append(values["step"])

    place = Place()
    if kind == "log":
        del Place.add_scalar
    things = {
        "function": place.log,
        "by name": by_name,
        "run": Run(),
        "logger": Own(),
        "logger that hears": Hearing(),
        "logging": Theirs("theirs"),
    }
    logger = adapt(things.get(kind, place), last=7)
    logger.log_hyperparams({"lr": 0.1})
    for step in (5, 6, 7, 8, 9, 8):
        logger.log_metrics({"train/loss": 0.5}, step)
    assert isinstance(logger, Hears) == (kind == "logger that hears")
    if isinstance(logger, Hears):
        logger.log_event("an event")
    logger.finalize("success")
    assert rows == [8, 9]
    heard = ["an event"] if "hears" in kind else []
    assert others == ([{"lr": 0.1}, *heard, "success"] if "logger" in kind else [])
