"""`manyhands demo`: processes on this machine train one net on real digits, with plain DDP.

They meet at a hub inside this process (or at the broker you name) and only dial out, so what is
shown is what happens between machines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Annotated, Any

import typer
from rich.console import Console

from manyhands.core.errors import LinkTimeout, ManyhandsError, SettingsError
from manyhands.links.base import open_link
from manyhands.links.hub import Hub

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
_WAIT_S = 120.0  # for news of a rank; importing torch takes most of it on a slow machine
_CLOSE = 1e-3  # how far sums in another order may lead parameters apart in this training


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=2, max=16, help="How many processes train.")] = 3,
    amqp: Annotated[str | None, typer.Option(help="Meet at this broker instead.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Train on real digits with plain DDP: every process dials out to a hub in this one."""
    if importlib.util.find_spec("sklearn") is None:
        raise SettingsError(
            "the digits come with scikit-learn, which is not installed",
            hint="pip install '.[demo]' in the folder of manyhands",
        )
    console = Console(stderr=json_output)
    with contextlib.ExitStack() as stack:
        if amqp is None:
            hub = stack.enter_context(Hub("127.0.0.1:0"))
            url, place = hub.address.code(), "a hub in this process (TLS, token)"
        else:
            url, place = amqp, "your broker"
            # One clear error now rather than one from each process.
            open_link(url, run=f"demo-{os.getpid()}-try").close()
        console.print(f"{peers} processes start, import torch, and meet at {place}")
        ranks = stack.enter_context(Ranks(url, peers))
        summary = watch(ranks, console)
    if json_output:
        print(json.dumps(summary))
    else:
        tell(summary, peers)
    if not summary["off"] < _CLOSE:
        raise ManyhandsError(f"the parameters are {summary['off']:g} away from one process's")


def watch(ranks: Ranks, console: Console) -> dict[str, Any]:
    """Show each epoch once all ranks have told of it; returns what rank 0 said last."""
    epochs: dict[int, list[dict[str, Any]]] = {}
    last: dict[str, Any] = {}
    for said in ranks.news():
        if "off" in said:
            last = {**last, "off": said["off"], "parameters": said["parameters"]}
            continue
        told = epochs.setdefault(said["epoch"], [])
        told.append(said)
        if len(told) < ranks.number:
            continue
        last = {
            "peers": ranks.number,
            "epochs": said["epoch"],
            "loss": sum(t["loss"] for t in told) / len(told),
            "accuracy": said["accuracy"],
            "steps_per_s": min(t["steps_per_s"] for t in told),
        }
        if said["epoch"] == 1 or said["epoch"] % 5 == 0:
            console.print(
                f"epoch {said['epoch']:2}  loss {last['loss']:.3f}  "
                f"test accuracy {100 * last['accuracy']:.1f} %  {last['steps_per_s']:.0f} steps/s"
            )
    return last


def tell(summary: dict[str, Any], peers: int) -> None:
    """The last words."""
    print(
        f"{peers} processes, {summary['parameters']} parameters: "
        f"{100 * summary['accuracy']:.1f} % of unseen digits right. One process that trains on the "
        f"same batches ends with the same parameters, to {summary['off']:.0e}."
    )


class Ranks:
    """The processes of a demo: what they say, and their end."""

    def __init__(self, url: str, number: int) -> None:
        self.number = number
        self._news: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self._processes = [self._start(url, rank) for rank in range(number)]
        self._readers = [
            threading.Thread(target=self._listen, args=(rank,), daemon=True)
            for rank in range(number)
        ]
        for reader in self._readers:
            reader.start()

    def _start(self, url: str, rank: int) -> subprocess.Popen[str]:
        # By the environment, not by argument: command lines are public.
        environment = {
            **os.environ,
            "MANYHANDS_URL": url,
            "MANYHANDS_RUN": f"demo-{os.getpid()}",
            "RANK": str(rank),
            "WORLD_SIZE": str(self.number),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "manyhands.cli.demo_peer"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which ends them
        )

    def _listen(self, rank: int) -> None:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            self._news.put((rank, line))
        self._news.put((rank, None))

    def news(self) -> Iterator[dict[str, Any]]:
        """What they say, until all have ended. Raises if one of them fails, or falls silent."""
        left = self.number
        while left:
            try:
                rank, line = self._news.get(timeout=_WAIT_S)
            except Empty:
                raise LinkTimeout("news of the demo's processes", _WAIT_S) from None
            if line is not None:
                yield json.loads(line)
                continue
            left -= 1
            if code := self._processes[rank].wait(_WAIT_S):
                raise ManyhandsError(f"rank {rank} ended with code {code}; its error is above")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.wait()
            reader.join()
            if process.stdout is not None:
                process.stdout.close()
