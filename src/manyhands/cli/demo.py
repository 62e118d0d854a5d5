"""`manyhands demo`: peers on this machine exchange tensors; one is killed, one joins.

Each peer is a process of its own. They meet at a hub inside this one (or at the broker you name),
so what is shown is what happens between machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from manyhands.core.errors import LinkTimeout, ManyhandsError
from manyhands.links.base import open_link
from manyhands.links.hub import Hub

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
PART_MB = 1.048576
_WAIT_S = 60.0  # for a peer to come or go; importing torch takes most of it on a slow machine


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=2, max=16, help="How many peers begin.")] = 4,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long each scene lasts.")] = 3.0,
    amqp: Annotated[str | None, typer.Option(help="Meet at this broker instead.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Show peers exchanging tensors through a hub: one is killed -9, one joins late."""
    with contextlib.ExitStack() as stack:
        if amqp is None:
            hub = stack.enter_context(Hub("127.0.0.1:0"))
            url, place = hub.address.code(), "a hub in this process (TLS, token)"
        else:
            url, place = amqp, "your broker"
            # One clear error now rather than one from each process.
            open_link(url, run=f"demo-{os.getpid()}").close()
        show = stack.enter_context(Show(place, quiet=json_output))
        cast = stack.enter_context(Cast(url, show))
        summary = play(cast, show, peers, seconds)
    if json_output:
        print(json.dumps(summary))
    else:
        tell(summary)
    if summary["wrong"]:
        raise ManyhandsError(f"{summary['wrong']} tensors arrived wrong")


def play(cast: Cast, show: Show, num_peers: int, scene_s: float) -> dict[str, Any]:
    """The plot; returns what was measured."""
    first = [f"peer-{i + 1}" for i in range(num_peers)]
    for name in first:
        cast.enter(name)
    show.say(f"{num_peers} processes start (each imports torch)")
    cast.wait("all peers active", lambda: all(cast.sees(name, set(first)) for name in first))
    show.say("all of them see each other; every tensor is checked on arrival")
    time.sleep(scene_s)  # something to look at
    victim, rest = first[1], set(first) - {first[1]}
    killed_s = cast.kill(victim)
    show.say(f"{victim} is killed -9")
    cast.wait("the others going on", lambda: all(cast.sees(name, rest) for name in rest))
    noticed_s = cast.last("left", victim) - killed_s
    show.say(f"the others know after {noticed_s:.2f} s and go on")
    time.sleep(scene_s)
    late = f"peer-{num_peers + 1}"
    cast.enter(late)
    show.say(f"{late} joins")
    everyone = rest | {late}
    cast.wait("the newcomer active", lambda: all(cast.sees(name, everyone) for name in everyone))
    time.sleep(scene_s)
    return {"peers": num_peers, "killed_noticed_s": round(noticed_s, 3), **cast.leave()}


def tell(summary: dict[str, Any]) -> None:
    """The last words."""
    print(
        f"{summary['received']} tensors of 1 MiB arrived, {summary['wrong']} of them wrong. "
        f"The others waited for the killed peer until it was out, {summary['killed_noticed_s']} s "
        "after the kill, and went on without it."
    )


@dataclass
class Actor:
    """A peer process and the last it said."""

    process: subprocess.Popen[str]
    reader: threading.Thread
    tally: dict[str, Any] = field(default_factory=dict[str, Any])
    state: str = "starting"
    rates: tuple[float, float, int] = (0.0, 0.0, 0)  # MB/s, time, tensors received then


class Cast:
    """The peer processes of a demo, their reports, and their end."""

    def __init__(self, url: str, show: Show) -> None:
        # By the environment, not by argument: command lines are public.
        self._environ = {**os.environ, "MANYHANDS_URL": url, "MANYHANDS_RUN": f"demo-{os.getpid()}"}
        self._show = show
        self._changed = threading.Condition()
        self._events: list[tuple[float, str, str]] = []
        self.actors: dict[str, Actor] = {}

    def __enter__(self) -> Cast:
        self._show.watch(self.actors)
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors.values():
            actor.process.kill()
        for actor in self.actors.values():
            actor.process.wait()
            actor.reader.join()
            for pipe in (actor.process.stdin, actor.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def enter(self, name: str) -> None:
        """Start a peer."""
        process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.cli.demo_peer", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environ,
            start_new_session=True,  # Ctrl-C is for this process, which ends them
        )
        reader = threading.Thread(target=self._listen, args=(name, process), daemon=True)
        self.actors[name] = Actor(process, reader)
        reader.start()

    def kill(self, name: str) -> float:
        """kill -9; returns the time of it."""
        actor = self.actors[name]
        actor.state = "killed"
        actor.process.kill()
        return time.time()

    def sees(self, name: str, peers: set[str]) -> bool:
        """Whether that peer's newest view has exactly these active."""
        return set(self.actors[name].tally.get("roster", ())) == peers

    def last(self, event: str, peer: str) -> float:
        """When the last of the peers reported it."""
        return max(at for at, what, who in self._events if (what, who) == (event, peer))

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Until `done`, or a peer has ended that should not have."""
        deadline = time.monotonic() + _WAIT_S
        with self._changed:
            while not done():
                for name, actor in self.actors.items():
                    if actor.process.poll() not in (None, 0) and actor.state != "killed":
                        raise ManyhandsError(f"{name} ended with code {actor.process.returncode}")
                if time.monotonic() > deadline:
                    raise LinkTimeout(what, _WAIT_S)
                self._changed.wait(1.0)

    def leave(self) -> dict[str, Any]:
        """Let everybody go home; returns the totals."""
        alive = [a for a in self.actors.values() if a.state != "killed"]
        for actor in alive:
            assert actor.process.stdin is not None
            actor.process.stdin.close()
        for actor in alive:
            actor.process.wait(_WAIT_S)
            actor.reader.join()
            actor.state = "left"
        tallies = [a.tally for a in alive]
        return {key: sum(t[key] for t in tallies) for key in ("sent", "received", "wrong")}

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            with self._changed:
                actor = self.actors[name]
                if said["event"] == "tally":
                    actor.tally = said
                    if actor.state == "starting":
                        actor.state = "active"
                else:
                    self._events.append((said["time"], said["event"], said.get("peer", "")))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class Show:
    """What the audience sees: a live table on a terminal, plain lines elsewhere."""

    def __init__(self, place: str, *, quiet: bool) -> None:
        self._console = Console(stderr=quiet)
        self._place, self._line = place, ""
        self._actors: dict[str, Actor] = {}
        # rich repaints from a thread of its own, four times a second.
        self._live = (
            Live(get_renderable=self._table, console=self._console, refresh_per_second=4)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> Show:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def watch(self, actors: dict[str, Actor]) -> None:
        """Show these from now on."""
        self._actors = actors

    def say(self, line: str) -> None:
        """What is happening."""
        self._line = line
        if self._live is None:
            self._console.print(line)

    def _table(self) -> Table:
        table = Table(title=f"manyhands demo: peers meet at {self._place}", caption=self._line)
        for column in ("peer", "state", "view", "sees", "sent", "received", "MB/s in", "wrong"):
            table.add_column(column, justify="left" if column in ("peer", "state") else "right")
        for name, actor in list(self._actors.items()):
            style = {"killed": "red", "active": "green"}.get(actor.state, "dim")
            tally = actor.tally
            table.add_row(
                name,
                actor.state,
                str(tally.get("view", "")),
                str(len(tally.get("roster", ()))),
                str(tally.get("sent", "")),
                str(tally.get("received", "")),
                f"{_rate(actor):.0f}",
                str(tally.get("wrong", "")),
                style=style,
            )
        return table


def _rate(actor: Actor) -> float:
    """MB/s received, over the time since the last report but a second ago."""
    rate, since, then = actor.rates
    now, received = actor.tally.get("time", 0.0), actor.tally.get("received", 0)
    if actor.state != "active":
        return 0.0
    if now - since >= 1.0:
        rate = (received - then) * PART_MB / (now - since) if since else 0.0
        actor.rates = (rate, now, received)
    return rate
