"""Trainer: DeepBooster's front door."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from manyhands.collectives.mail import Mail
from manyhands.compat.deepbooster.broker import broker_address
from manyhands.compat.deepbooster.dataset import Dataset, Transformer
from manyhands.compat.deepbooster.errors import ChunkError, TrainingBegun
from manyhands.compat.deepbooster.learner import Criterion, Learner
from manyhands.compat.deepbooster.report import Report
from manyhands.compat.deepbooster.station import Station
from manyhands.compat.deepbooster.training import EarlierRun, Training
from manyhands.core.errors import UsageError
from manyhands.core.peers import PEER_NAME_HINT, is_peer_name
from manyhands.links.amqp import login_of
from manyhands.links.amqp.queues import check_queue
from manyhands.links.base import LinkSettings, dial, new_peer

CONNECT_S = 15.0
EARLIER_RUN_S = 30.0  # for the trainers of the last training to be out of it
_PAUSE_S = 0.5


class Trainer:
    """One of several processes that train one model on chunks of their own.

    The parameters are DeepBooster's. `trainers_queues` names all trainers, in any order, and
    `my_queue` is this one's name among them. Without `chunk_path`, the chunk is the one that a
    `Launcher` sends with the ignition. The model is moved to `device` at once.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        n_epoch: int,
        ignition_queue: str,
        my_queue: str,
        trainers_queues: Sequence[str],
        url_parameters: str,
        chunk_path: str | os.PathLike[str] | None = None,
        transformer: Transformer | None = None,
        apply_transformer_to_label: bool = False,
    ) -> None:
        _check_names(ignition_queue, my_queue, trainers_queues)
        if type(n_epoch) is not int or n_epoch < 1:
            raise UsageError(f"n_epoch={n_epoch!r} trains nothing", hint="an int, at least 1")
        self._ignition_queue, self._my_queue = ignition_queue, my_queue
        self._names = sorted(trainers_queues)
        self._n_epoch = n_epoch
        self._address = replace(broker_address(url_parameters), run=run_of(self._names))
        self._chunk_path = None if chunk_path is None else Path(chunk_path)
        self._transformer, self._to_label = transformer, apply_transformer_to_label
        self._learner = Learner(model, criterion, optimizer, device)

    def start(self) -> Report:
        """Wait for a message in the ignition queue and for all trainers; train; how it went.

        Makes and binds both queues and purges `my_queue`. Raises ChunkError, QueueInUse,
        TrainingBegun, TrainingBroken, LinkError, and whatever the model or the criterion raises.
        """
        if self._chunk_path is not None and self._chunk_path.exists():
            self._open(self._chunk_path).close()  # what is broken shows before the others wait
        station = Station(
            login_of(self._address), my_queue=self._my_queue, ignition_queue=self._ignition_queue
        )
        station.open()
        try:
            sent = station.wait_for_ignition()
            dataset = self._open(self._chunk_path or _path_in(sent, self._ignition_queue))
            try:
                return self._train(dataset)
            finally:
                dataset.close()
        finally:
            station.close()

    def _open(self, path: Path) -> Dataset:
        return Dataset(path, self._transformer, self._to_label)

    def _train(self, dataset: Dataset) -> Report:
        deadline = time.monotonic() + EARLIER_RUN_S
        while True:
            mail = Mail()
            settings = LinkSettings(connect_s=CONNECT_S)
            link = dial(self._address, new_peer(self._my_queue), settings, mail)
            try:
                training = Training(
                    link, mail, self._learner, dataset, names=self._names, n_epoch=self._n_epoch
                )
            except BaseException:  # perhaps of the user's optimizer
                link.close()
                raise
            try:
                return training.run()
            except EarlierRun:
                if time.monotonic() > deadline:
                    raise TrainingBegun(
                        "the last training of these trainers has not ended everywhere",
                        hint="end the processes that still hang in it",
                    ) from None
            finally:
                training.close()
            time.sleep(_PAUSE_S)


def run_of(names: Sequence[str]) -> str:
    """The run of the trainers with these sorted names."""
    return f"deepbooster-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]}"


def _check_names(ignition_queue: str, my_queue: str, trainers_queues: Sequence[str]) -> None:
    if isinstance(trainers_queues, str):  # whose letters would be trainers
        raise UsageError(f"trainers_queues={trainers_queues!r}", hint="a list of names")
    for name in (ignition_queue, my_queue, *trainers_queues):
        check_queue(name)
    for name in trainers_queues:
        if not is_peer_name(name):
            raise UsageError(f"{name[:80]!r} cannot name a trainer", hint=PEER_NAME_HINT)
    if my_queue not in trainers_queues:
        raise UsageError(
            f"my_queue={my_queue!r} is not among trainers_queues={list(trainers_queues)}",
            hint="trainers_queues has the my_queue of every trainer, this one's too",
        )
    if len(set(trainers_queues)) < len(trainers_queues):
        raise UsageError(f"trainers_queues={list(trainers_queues)}: a name comes twice")
    if ignition_queue in trainers_queues:
        raise UsageError(
            f"ignition_queue={ignition_queue!r} is also the my_queue of a trainer",
            hint="a trainer needs two queues",
        )


def _path_in(sent: bytes, queue: str) -> Path:
    try:
        text = sent.decode().strip()
    except UnicodeDecodeError:
        text = ""
    # Not Path.is_file, which raises for names that are too long or lead where this user may not.
    if not text or not text.isprintable() or not os.path.isfile(text):
        raise ChunkError(
            f"this trainer has no chunk_path, and the message in {queue} is no path of a file "
            f"here: {sent[:100]!r}",
            hint="give chunk_path, or ignite by Launcher.launch on a machine with the same files",
        )
    return Path(text)
