"""Session: what all process groups of one `init_process_group` share."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import torch

from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend.seats import name_of, take_seat
from manyhands.collectives.backend.store import Clerk, Keeper, MeetingStore
from manyhands.collectives.backend.team import Team
from manyhands.collectives.backend.work import Completer
from manyhands.core.address import Address
from manyhands.core.errors import AddressError, Excluded, Refused, SettingsError
from manyhands.core.peers import PeerId
from manyhands.core.settings import MeetingPoint, find_meeting_point, find_outage
from manyhands.links.base import Link, LinkSettings, dial, new_peer

_NUM_DIALS = 5


class Placement:
    """What a link asks where to put the buffers of a message, before and after there is a team."""

    def __init__(self) -> None:
        self.team: Team | None = None

    def __call__(
        self, sender: PeerId, message: bytes, sizes: tuple[int, ...]
    ) -> Sequence[memoryview] | None:
        return None if self.team is None else self.team.place(sender, message, sizes)


class Session:
    """A link, its team, the store, and the threads that complete operations."""

    def __init__(
        self,
        url: str | Address | None,
        rank: int | None,
        world: int | None,
        timeout_s: float,
        *,
        settings: LinkSettings | None = None,
        called_off: Callable[[], str | None] | None = None,
    ) -> None:
        point = (
            find_meeting_point(url, run=None, name=name_of(rank), environ=os.environ)
            if url is None or isinstance(url, str)
            else MeetingPoint(address=url, name=name_of(rank))
        )
        if point.address.run is None:
            raise AddressError(
                f"{point.address} names no run",
                hint="add ?run=NAME to it, or set MANYHANDS_RUN",
            )
        placement = Placement()
        link: Link | None = None
        try:
            settings = settings or LinkSettings(outage_s=find_outage(os.environ))
            link = _dial(point, settings, placement)
            where = f"run {point.address.run!r} ({point.address})"
            seating = take_seat(link, rank, world, timeout_s, where=where, called_off=called_off)
        except Excluded as excluded:
            if link is not None:
                link.close()
            raise Refused(
                "seats",
                f"this process is out of run {point.address.run!r}: {excluded.reason}",
                hint="give each process a rank of its own, and each group a run of its own",
            ) from None
        except BaseException:
            if link is not None:
                link.close()
            raise
        self.timeout_s = timeout_s
        self.keeper = Keeper(link.terms.part_bytes)
        self.clerk = Clerk(self._post, link.terms.part_bytes)
        self.team = Team(link, seating.roster, seating.view, other_words=self._heard)
        placement.team = self.team
        self.rank, self.world = self.team.rank, len(seating.roster)
        self.store = MeetingStore(self.clerk, timeout_s, self)
        self.completer = Completer(str(link.me))
        self.world_group: object = None  # the process group of everybody, once there is one
        self._num_groups: dict[tuple[int, ...], int] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.team.start_reading()
        self._process = os.getpid()
        # Threads that live on into the end of the interpreter abort the process.
        atexit.register(self._close_at_exit)

    def stream_for(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that copies to and from this device."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            return self._streams[device]

    def count(self, ranks: tuple[int, ...]) -> int:
        """How many groups of these ranks there have been: the same number on all of them."""
        with self._lock:
            self._num_groups[ranks] = self._num_groups.get(ranks, 0) + 1
            return self._num_groups[ranks]

    def close(self) -> None:
        """Leave the run. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._close_at_exit)
        self.team.close()
        self.completer.close()

    def _close_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a fork has none of the threads, and the connection is its parent's
        # A Ctrl-C from here on ends the process at once; as an exception it would only be shown.
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.close()

    # -- the store ------------------------------------------------------------------------------

    def _post(self, word: words.Word, buffers: Sequence[memoryview]) -> None:
        if self.rank != 0:
            return self.team.send(0, word, buffers)
        assert isinstance(word, words.Ask)
        return self._serve(0, word, bytes(buffers[0]) if buffers else b"")

    def _heard(self, rank: int, word: words.Any, buffers: Sequence[memoryview]) -> None:
        value = bytes(buffers[0]) if buffers else b""
        match word:
            case words.Ask():
                self._serve(rank, word, value)
            case words.Answer():
                self.clerk.answered(word, value)
            case words.Failed():
                self.clerk.failed(word.reason)
            case words.Goodbye():
                self.keeper.forget(rank)
                if rank == 0:
                    self.clerk.failed("rank 0, which keeps it, has left the group")
            case _:
                pass  # late words of the seating

    def _serve(self, rank: int, ask: words.Ask, value: bytes) -> None:
        def reply(number: int, answer: bytes, error: str) -> None:
            word = words.Answer(ask.id, int(number), error)
            if rank == 0:
                self.clerk.answered(word, answer)
            else:
                self.team.send(rank, word, [memoryview(answer)])

        self.keeper.ask(rank, ask, value, reply)


def _dial(point: MeetingPoint, settings: LinkSettings, placement: Placement) -> Link:
    for left in reversed(range(_NUM_DIALS)):
        try:
            return dial(point.address, new_peer(point.name), settings, placement)
        except Refused as refused:
            # The group that met here before is leaving, and its last peer takes along what a broker
            # had for this run, just when it was to be used again.
            if refused.code != "missing" or not left:
                raise
    raise AssertionError("unreachable")


def open_session(url: str, timeout: timedelta) -> Session:
    """From what torch hands to a rendezvous: a URL with `rank` and `world_size` in its query."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(query)
    rest = urlencode([(k, v) for k, v in query if k not in ("rank", "world_size")])
    plain = urlunsplit(parts._replace(query=rest))
    rank = _number("rank", given.get("rank"), "RANK")
    world = _number("world_size", given.get("world_size"), "WORLD_SIZE")
    if world is None:  # as `manyhands run` knows it
        world = _number("world_size", None, "MANYHANDS_WORLD_SIZE")
    return Session(plain or None, rank, world, timeout.total_seconds())


def _number(name: str, given: str | None, variable: str) -> int | None:
    """From the caller, then from torchrun's environment, else None: the meeting point decides."""
    text = given if given not in (None, "-1") else os.environ.get(variable)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{name} is {text!r}", hint=f"a number; see {variable} too") from None
