"""Observe: what a run tells its user: loggers, events."""

from manyhands.observe.adapt import adapt
from manyhands.observe.base import Logger, MissingExtra
from manyhands.observe.console import Console, Records
from manyhands.observe.desk import Count, Desk
from manyhands.observe.events import EventLog, Happening, merge
from manyhands.observe.files import Csv, JsonLines
from manyhands.observe.tensorboard import TensorBoard
from manyhands.observe.wandb import Wandb

__all__ = [
    "Console",
    "Count",
    "Csv",
    "Desk",
    "EventLog",
    "Happening",
    "JsonLines",
    "Logger",
    "MissingExtra",
    "Records",
    "TensorBoard",
    "Wandb",
    "adapt",
    "merge",
]
