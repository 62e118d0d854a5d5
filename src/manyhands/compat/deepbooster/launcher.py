"""Launcher: splits a JSONL file among the trainers, and ignites them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from manyhands.compat.deepbooster.broker import broker_address
from manyhands.compat.deepbooster.errors import ChunkError
from manyhands.compat.deepbooster.lines import open_lines, scan
from manyhands.core.errors import UsageError
from manyhands.data.chunks import deal
from manyhands.links.amqp import login_of
from manyhands.links.amqp.queues import check_queue, post, set_up


class Launcher:
    """For the trainers with these ignition queues, in this order. No torch is needed for it."""

    def __init__(self, ignition_queues: Sequence[str], url_parameters: str) -> None:
        if isinstance(ignition_queues, str):  # whose letters would be queues
            raise UsageError(f"ignition_queues={ignition_queues!r}", hint="a list of names")
        queues = [check_queue(name) for name in ignition_queues]
        if not queues or len(set(queues)) < len(queues):
            raise UsageError(
                f"ignition_queues={queues}: each trainer has one of its own", hint="name each once"
            )
        self.ignition_queues = queues
        self._login = login_of(broker_address(url_parameters))

    def launch(self, data: str | os.PathLike[str]) -> list[Path]:
        """Line i of `data` goes to chunk i % n; then every trainer is sent the path of its chunk.

        The chunks are `0.chunk`, `1.chunk`, ... beside `data`; those of an earlier launch are
        replaced, each at one moment, once all are written. Returns their absolute paths. With a
        broken line nothing is written and nobody is ignited. Raises ChunkError, LinkError.
        """
        set_up(self._login, self.ignition_queues)  # what cannot be reached shows before the work
        chunks = split(Path(data).absolute(), len(self.ignition_queues))
        paths = [str(chunk).encode() for chunk in chunks]
        post(self._login, dict(zip(self.ignition_queues, paths, strict=True)))
        return chunks


def split(data: Path, num: int) -> list[Path]:
    """The lines of `data`, dealt round-robin into `num` files beside it. Raises ChunkError."""
    chunks = [data.with_name(f"{place}.chunk") for place in range(num)]
    try:
        with open_lines(data) as source:
            deal((line.text for line in scan(source, data)), chunks, data)
    except OSError as error:
        raise ChunkError(
            f"chunks cannot be written to {data.parent}: {error.strerror}",
            hint="make room there, or copy the data to where there is some and you may write",
        ) from None
    return chunks
