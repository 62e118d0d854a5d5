"""Launcher: splits a JSONL file among the trainers, and ignites them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

from manyhands.compat.deepbooster.broker import broker_address
from manyhands.compat.deepbooster.errors import ChunkError
from manyhands.compat.deepbooster.lines import open_lines, scan
from manyhands.core.errors import UsageError
from manyhands.links.amqp import login_of
from manyhands.links.amqp.queues import check_queue, post, set_up


class Launcher:
    """For the trainers with these ignition queues, in this order. No torch is needed for it."""

    def __init__(self, ignition_queues: Sequence[str], url_parameters: str) -> None:
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
        _deal(data, chunks)
    except OSError as error:
        raise ChunkError(
            f"chunks cannot be written to {data.parent}: {error.strerror}",
            hint="make room there, or copy the data to where there is some and you may write",
        ) from None
    return chunks


def _deal(data: Path, chunks: Sequence[Path]) -> None:
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_lines(data))
        if any(chunk.exists() and chunk.samefile(data) for chunk in chunks):  # by a link, too
            raise UsageError(f"{data} would be replaced by a chunk of itself", hint="rename it")
        writing = [stack.enter_context(_unnamed_yet(data.parent)) for _ in chunks]
        for place, line in enumerate(scan(source, data)):
            writing[place % len(chunks)].write(line.text.rstrip(b"\r\n") + b"\n")
        for file in writing:
            file.flush()
            os.fsync(file.fileno())
        for file, chunk in zip(writing, chunks, strict=True):
            os.chmod(file.name, data.stat().st_mode & 0o777)
            os.replace(file.name, chunk)


@contextlib.contextmanager
def _unnamed_yet(folder: Path):  # noqa: ANN202
    """A file to write; removed at the end unless it has got another name."""
    made = tempfile.NamedTemporaryFile(dir=folder, prefix=".chunk-", delete=False)  # noqa: SIM115
    try:
        with made:
            yield cast("BinaryIO", made)
    finally:
        Path(made.name).unlink(missing_ok=True)
