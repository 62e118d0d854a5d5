"""Rows for people."""

from __future__ import annotations

import io
import logging

from manyhands.observe import Console, Records

END = {"epoch": 0.0, "train/loss": 0.25, "train/epoch_loss": 0.5, "val/loss": 0.75}


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_and_one_that_stays_for_an_epoch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "48")
    screen = Screen()
    console = Console(screen)
    console.log_hyperparams({"lr": 0.1})
    console.log_metrics({"train/loss": 0.123456}, 0)
    console.log_metrics(END, 1)
    console.log_metrics({"train/loss": 0.1}, 2)
    console.finalize("success")
    console.finalize("success")
    assert screen.getvalue() == (
        "\r\x1b[Kstep 0  train/loss 0.1235"
        "\r\x1b[Kstep 1  epoch 0  train/loss 0.25  train/epoch_l\n"
        "\r\x1b[Kstep 2  train/loss 0.1\n"
    )


def test_elsewhere_a_line_for_every_epoch():
    stream = io.StringIO()
    console = Console(stream)
    console.log_metrics({"train/loss": 0.123456}, 0)
    console.log_metrics(END, 1)
    console.finalize("success")
    assert stream.getvalue() == (
        "step 1  epoch 0  train/loss 0.25  train/epoch_loss 0.5  val/loss 0.75\n"
    )


def test_records_of_pythons_logging(caplog):
    caplog.set_level(logging.DEBUG)
    logger = Records()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"train/loss": 0.5}, 0)
    logger.log_metrics(END, 1)
    logger.finalize("success")
    assert [(r.name, r.levelname) for r in caplog.records] == [
        ("manyhands.steps", "DEBUG"),
        ("manyhands.steps", "DEBUG"),
        ("manyhands.steps", "INFO"),
    ]
    assert caplog.messages[:2] == ["lr 0.1", "step 0  train/loss 0.5"]
