"""`manyhands worker`, `python -m manyhands.worker`: take part in what a BossMan distributes."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands._version import __version__
from manyhands.core.address import HubAddress, host_port
from manyhands.core.boss import dialling
from manyhands.core.errors import LinkBroken, LinkTimeout, ManyhandsError, UsageError
from manyhands.core.peers import PEER_NAME_HINT, PeerId, is_peer_name
from manyhands.core.settings import find
from manyhands.links.base import dial, new_peer

if TYPE_CHECKING:
    from manyhands.stages.commands import Offer
    from manyhands.worker.workshop import Workshop

ALLOWED = ("torch.nn", "torch.optim", "manyhands.compat")
_MOST_MIB = 1e12  # what has an end can be counted in bytes
_PAUSE_S = 0.2  # between two looks whether the boss listens
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
log = logging.getLogger(__name__)


@app.command()
def worker(
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE",
            help=f"Build classes of this package, too; repeatable. (always: {', '.join(ALLOWED)})",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where layers run. (default: cuda if there is one, or cpu)")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="What the boss calls this worker. (default: MANYHANDS_NAME, or a new one)"
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(min=0, max=_MOST_MIB, help="MiB to offer. (default: all that are free)"),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a boss to listen.")
    ] = 60.0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="No TLS, no token, to another machine; the boss says so, too."
        ),
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="What happens, as JSON lines on stdout.")
    ] = False,
) -> None:
    """Offer this machine to a BossMan: build the layers that it sends here, and run them.

    It dials MODEL_HOST:MODEL_PORT, with MODEL_TOKEN beyond loopback, and ends when the boss does.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _interrupt)
    from manyhands.stages.commands import RUN

    address = dialling(os.environ, run=RUN, insecure=insecure)
    me = new_peer()
    label = find("name", name, environ=os.environ) or me.name
    if not is_peer_name(label):
        raise UsageError(f"a worker cannot be named {label[:100]!r}", hint=PEER_NAME_HINT)

    def tell(event: str) -> None:
        where = host_port(address.host, address.port)
        log.info("worker %s at %s: %s", label, where, event)
        if json_output:
            said = {"event": event, "name": label, "host": address.host, "port": address.port}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()

    try:
        workshop, offer = _prepare(address, label, allow or (), device, memory)
        _await_boss(address, wait)
        _serve(address, me, workshop, offer, wait, tell)
        tell("finished")
    except KeyboardInterrupt:
        tell("stopped")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _await_boss(address: HubAddress, patience_s: float) -> None:
    """Return when something listens there. No event tells of it: it is asked again and again."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=5.0).close()
            return
        except socket.gaierror as error:
            raise LinkBroken(
                f"MODEL_HOST={address.host} is no host that this machine knows: {error.strerror}"
            ) from None
        except OSError:
            if time.monotonic() >= deadline_s:
                where = host_port(address.host, address.port)
                raise LinkTimeout(
                    f"boss at {where}",
                    patience_s,
                    hint="does it run, with this MODEL_HOST and MODEL_PORT, and is its port open?",
                ) from None
        time.sleep(_PAUSE_S)


def _prepare(
    address: HubAddress,
    label: str,
    allow: Sequence[str],
    device: str | None,
    memory: float | None,
) -> tuple[Workshop, Offer]:
    from manyhands.planner.memory import free_memory
    from manyhands.stages.commands import Offer
    from manyhands.worker.workshop import Workshop, device_of

    chosen = device_of(device)
    offered = free_memory(chosen) if memory is None else int(memory * (1 << 20))
    workshop = Workshop(address, chosen, [*ALLOWED, *allow], offered)
    return workshop, Offer(label, str(chosen), offered, __version__)


def _serve(
    address: HubAddress,
    me: PeerId,
    workshop: Workshop,
    offer: Offer,
    patience_s: float,
    tell: Callable[[str], None],
) -> None:
    from manyhands.stages.commands import SETTINGS
    from manyhands.worker.servant import Servant

    with dial(address, me, SETTINGS) as link:
        try:
            Servant(link, workshop, offer, tell).serve(max(patience_s, SETTINGS.connect_s))
        finally:
            workshop.close()


def main() -> None:
    """Runs the command; exit codes as those of `manyhands`."""
    try:
        app()
    except ManyhandsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
