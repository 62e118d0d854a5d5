"""The hub keeps the contract of every link, with and without TLS, and what it owes besides."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import msgspec
import pytest

from manyhands.core.address import HubAddress
from manyhands.core.errors import LinkBroken, LinkClosed, Refused, SettingsError
from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber
from manyhands.links.base import Gap, LinkSettings, open_link
from manyhands.links.hub import Hub, HubLimits
from manyhands.links.memory import Loan
from manyhands.links.messages import (
    HEADER_BYTES,
    SCHEMA,
    Beat,
    Credit,
    Data,
    Dismissal,
    Hello,
    Leaving,
    NewView,
    Refusal,
    Return,
    Welcome,
)
from manyhands.links.session import ACK_BYTES
from manyhands.testing.contract import (
    PATIENCE_S,
    PATIENT,
    QUICK,
    STEADY,
    LinkContract,
    Meeting,
    Reader,
    activate,
    number_of,
    sealed,
    together,
)
from manyhands.testing.proxy import Proxy
from manyhands.wire.frames import FrameReader, Limits


class HubMeeting(Meeting):
    """A hub with a memory, so that it can restart."""

    def __init__(self, tmp_path, *, insecure: bool, door: bool = False) -> None:
        self._options = {"state": tmp_path / "state", "insecure": insecure, "door": door}
        self.hub = Hub("127.0.0.1:0", **self._options)
        super().__init__(url_of(self.hub.address))

    def __exit__(self, *details) -> None:
        super().__exit__(*details)
        self.hub.close()

    def target(self):
        return "127.0.0.1", self.hub.address.port

    def via(self, port):
        return url_of(dataclasses.replace(self.hub.address, port=port))

    def restart(self):
        self.hub.close()
        self.hub = Hub(f"127.0.0.1:{self.hub.address.port}", **self._options)


def url_of(address: HubAddress) -> str:
    return f"{address}?insecure=1" if address.insecure else address.code()


class TestHub(LinkContract):
    @pytest.fixture
    def meeting(self, tmp_path):
        with HubMeeting(tmp_path, insecure=True) as meeting:
            yield meeting


class TestHubWithTls(LinkContract):
    @pytest.fixture
    def meeting(self, tmp_path):
        with HubMeeting(tmp_path, insecure=False) as meeting:
            yield meeting


class TestHubByItsDoor(LinkContract):
    """As TLS, for peers of this machine. Whoever is cut off by a proxy comes by TCP."""

    @pytest.fixture
    def meeting(self, tmp_path):
        with HubMeeting(tmp_path, insecure=False, door=True) as meeting:
            yield meeting


# -- beyond the contract ---------------------------------------------------------------------------


@pytest.fixture
def hubs():
    """Starts hubs on a free loopback port, without a door, and ends them."""
    with ExitStack() as stack:
        yield lambda bind="127.0.0.1:0", **options: stack.enter_context(
            Hub(bind, door=False, **options)
        )


@pytest.fixture
def links():
    """Opens links, and closes them."""
    with ExitStack() as stack:

        def open_one(address, name, *, terms=STEADY, **settings):
            url = address if isinstance(address, str) else url_of(address)
            opened = open_link(
                url, run="run", name=name, settings=LinkSettings(terms=terms, **settings)
            )
            return stack.enter_context(opened)

        yield open_one


class Stranger:
    """Speaks the protocol by hand, or does not."""

    def __init__(self, address: HubAddress) -> None:
        self.sock = socket.create_connection(("127.0.0.1", address.port), timeout=PATIENCE_S)
        self._reader = FrameReader(
            self.sock.recv_into, Limits(header_bytes=HEADER_BYTES, payload_bytes=1 << 20)
        )

    def __enter__(self):
        return self

    def __exit__(self, *details) -> None:
        self.sock.close()

    def say(self, header, payload=b"") -> None:
        self.sock.sendall(SCHEMA.encode(header, len(payload)) + payload)

    def hear(self, kind):
        """The next frame of this kind; other frames are passed by."""
        while True:
            got = self._reader.next()
            assert got is not None, f"the hub hung up before {kind.__name__}"
            self._reader.skip_payload()
            header = SCHEMA.decode(got[0].kind, got[1])
            if isinstance(header, kind):
                return header

    def come_in(self, peer: PeerId, *, back=None, run="run"):
        self.say(Hello(run, peer, "", STEADY, "0", back))
        return self.hear(Welcome)

    def is_hung_up(self) -> bool:
        """Reads to the end; fails with a time-out when there is none."""
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True


def logged(caplog, *words: str) -> bool:
    """Whether, soon, one record has all these words."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if any(all(word in r.getMessage() for word in words) for r in caplog.records):
            return True
        time.sleep(0.01)
    return False


WRONG = {
    "token": {"token": "not-the-token"},
    "fingerprint": {"fingerprint": "ab" * 32},
    "run": {"run": "another"},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_peer_with_something_wrong_is_told_and_so_is_the_hub(hubs, caplog, what):
    hub = hubs(runs=frozenset({"run"}))
    address = dataclasses.replace(hub.address, **{"run": "run", **WRONG[what]})
    start_s = time.monotonic()
    with pytest.raises(Refused) as caught:
        open_link(address.code())
    assert caught.value.code == what
    assert caught.value.hint
    word = {"token": "token", "fingerprint": "certificate", "run": "another"}[what]
    assert logged(caplog, word)
    assert time.monotonic() - start_s < PATIENCE_S / 2
    told = f"{caught.value!r} {caught.value} {caplog.text} {hub.address!r} {hub.address}"
    assert hub.address.token not in told
    assert address.token not in told
    assert hub.address.code() not in told


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("drip", [False, True])
def test_a_connection_that_does_not_greet_is_ended(hubs, insecure, drip):
    hub = hubs(insecure=insecure, limits=HubLimits(handshake_s=0.5))
    with Stranger(hub.address) as stranger, ThreadPoolExecutor(1) as pool:
        start_s = time.monotonic()
        ended = pool.submit(stranger.is_hung_up)
        # A TLS record, or a frame, that says it is longer than what has come so far.
        head = SCHEMA.encode(Beat(1)) if insecure else b"\x16\x03\x01\x02\x00" + b"\x01" * 600
        for i in range(len(head) - 1 if drip else 0):
            if ended.done():
                break
            with suppress(OSError):
                stranger.sock.sendall(head[i : i + 1])
            time.sleep(0.05)
        assert ended.result(timeout=PATIENCE_S / 2)
        assert time.monotonic() - start_s < PATIENCE_S / 2  # such a drip would go on for longer


@pytest.mark.parametrize("insecure", [False, True])
def test_a_hub_closes_while_a_connection_is_silent(hubs, insecure):
    hub = hubs(insecure=insecure, limits=HubLimits(handshake_s=60))
    with Stranger(hub.address):
        time.sleep(0.1)  # until it is accepted; without, the test proves less and does not fail
        start_s = time.monotonic()
        hub.close()
        assert time.monotonic() - start_s < PATIENCE_S / 2


@pytest.mark.parametrize("insecure", [False, True])
def test_a_silent_connection_that_comes_while_a_hub_closes_is_ended(hubs, insecure):
    hub = hubs(insecure=insecure)
    hub.close()
    here, there = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, here:
        # Accepted before, served after: nobody else would end it any more.
        pool.submit(hub._serve, there, ("127.0.0.1", 1)).result(PATIENCE_S)
        assert here.recv(1) == b""


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        b"\x00" * 100,
        os.urandom(5000),
        SCHEMA.encode(Beat(1)),
    ],
    ids=["http", "zeros", "random", "not-hello"],
)
def test_garbage_is_turned_away_and_hurts_nobody(hubs, links, caplog, garbage, insecure):
    hub = hubs(insecure=insecure)
    one = Reader(links(hub.address, "one"))
    with Stranger(hub.address) as stranger:
        stranger.sock.sendall(garbage)
        assert stranger.is_hung_up()
    assert logged(caplog, "connection ended")
    two = links(hub.address, "two")
    one.until_view(lambda view: two.me in view.peers())


def test_tls_on_one_side_only_is_explained(hubs):
    with pytest.raises(LinkBroken, match="TLS"):
        open_link(f"hub://127.0.0.1:{hubs().address.port}/run?insecure=1")
    plain = hubs(insecure=True).address
    wrong = dataclasses.replace(plain, insecure=False, fingerprint="ab" * 32, token="t", run="run")
    with pytest.raises(LinkBroken, match="TLS"):
        open_link(wrong.code())


def test_no_hub_there_is_explained():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LinkBroken, match=f"no hub at 127.0.0.1:{port}"):
        open_link(f"hub://127.0.0.1:{port}/run?insecure=1")


# -- limits ----------------------------------------------------------------------------------------


def test_the_number_of_peers_is_limited(hubs, links):
    hub = hubs(insecure=True, limits=HubLimits(peers=2))
    one = Reader(links(hub.address, "one"))
    two = links(hub.address, "two")
    with pytest.raises(Refused) as caught:
        links(hub.address, "three")
    assert caught.value.code == "peers"
    two.close()
    one.until_view(lambda view: two.me in view.peers())
    one.until_without(two.me)
    eventually(lambda: links(hub.address, "three"))


def test_the_number_of_runs_is_limited(hubs):
    hub = hubs(insecure=True, limits=HubLimits(runs=1))
    url = url_of(hub.address)
    with open_link(url, run="one"), pytest.raises(Refused) as caught:
        open_link(url, run="two")
    assert caught.value.code == "runs"
    with eventually(lambda: open_link(url, run="two")):
        pass


def eventually(work):
    """What it returns once it is not refused any more."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return work()
        except Refused:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_quiet(caplog) -> bool:
    """Whether, all connections having ended, there was nothing to warn of."""
    deadline = time.monotonic() + PATIENCE_S
    while any(t.name == "hub connection" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_who_only_looks_whether_a_hub_listens_is_nothing_to_warn_of(hubs, caplog, insecure, how):
    caplog.set_level(logging.DEBUG)
    hub = hubs(insecure=insecure)
    with Stranger(hub.address) as stranger:
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert logged(caplog, "127.0.0.1", "without a byte")
    assert is_quiet(caplog)


@pytest.mark.parametrize("insecure", [False, True])
def test_who_breaks_off_after_a_byte_or_stays_too_long_is_warned_of(hubs, caplog, insecure):
    hub = hubs(insecure=insecure, limits=HubLimits(handshake_s=0.5))
    with Stranger(hub.address) as stranger:
        stranger.sock.sendall(b"\x16" if not insecure else b"M")
    assert logged(caplog, "connection ended")
    with Stranger(hub.address) as stranger:
        assert stranger.is_hung_up()
    assert logged(caplog, "no greeting in time")


def test_the_number_of_strangers_is_limited(hubs, links, caplog):
    hub = hubs(insecure=True, limits=HubLimits(handshakes=2, handshake_s=60))
    with Stranger(hub.address), Stranger(hub.address), Stranger(hub.address) as third:
        assert third.is_hung_up()
        assert logged(caplog, "turned away")


def test_bytes_in_flight_are_limited(hubs, links):
    """A receiver whose network stands still does not fill the hub's memory."""
    limit = 2 << 20
    hub = hubs(insecure=True, limits=HubLimits(bytes_in_flight=limit))
    terms = msgspec.structs.replace(STEADY, window_bytes=1 << 30, part_bytes=1 << 20)
    one = links(hub.address, "one", terms=terms)
    count = 40
    with Proxy("127.0.0.1", hub.address.port) as proxy:
        slow = Reader(links(dataclasses.replace(hub.address, port=proxy.port), "slow"))
        Reader(one).until_view(lambda view: slow.link.me in view.peers())
        proxy.stall()
        most = threading.Event()
        used: list[int] = []

        def send() -> None:
            for i in range(count):
                message, data = sealed(i, 1 << 20)
                one.send(slow.link.me, message, [data])

        def watch() -> None:
            start_s = time.monotonic()
            while not most.wait(0.01):
                used.append(hub._budget._used_bytes)
                if proxy._flowing.is_set():
                    continue
                if used[-1] > limit and time.monotonic() - start_s > 1.0:
                    proxy.go()

        def read() -> None:
            slow.until_deliveries(count)
            most.set()

        together(send, watch, read)
    assert [number_of(d) for d in slow.deliveries] == list(range(count))
    assert limit < max(used) <= limit + (2 << 20)


def test_a_small_memory_is_no_deadlock(hubs, links):
    """Everybody sends more than the hub holds before anybody's receipt comes through."""
    hub = hubs(insecure=True, limits=HubLimits(bytes_in_flight=1 << 20))
    terms = msgspec.structs.replace(STEADY, window_bytes=1 << 30, part_bytes=1 << 20, lease_s=120)
    readers = [Reader(links(hub.address, f"p{i}", terms=terms)) for i in range(3)]
    activate(*readers)
    count = 30

    def send(link) -> None:
        for i in range(count):
            message, data = sealed(i, 1 << 20)
            link.send(None, message, [data])

    start_s = time.monotonic()
    together(
        *(lambda r=r: send(r.link) for r in readers),
        *(lambda r=r: r.until_deliveries(2 * count) for r in readers),
    )
    # A connection that hangs is given up after half a lease, and then goes on.
    assert time.monotonic() - start_s < 0.4 * terms.lease_s
    for reader in readers:
        for other in readers:
            numbers = [number_of(d) for d in reader.deliveries if d.sender == other.link.me]
            assert numbers == ([] if other is reader else list(range(count)))


def test_the_hub_lets_go_of_what_a_peer_holds(hubs, links):
    """Long before its next beat."""
    hub = hubs(insecure=True)
    sizes = {"window_bytes": 8 << 20, "part_bytes": 1 << 20, "watch_bytes": 1 << 30}
    terms = msgspec.structs.replace(STEADY, beat_s=30, lease_s=120, **sizes)
    a, b = (Reader(links(hub.address, name, terms=terms)) for name in "ab")
    activate(a, b)
    count = 40

    def send() -> None:
        for i in range(count):
            message, data = sealed(i, 1 << 20)
            a.link.send(None, message, [data])

    def num_kept() -> int:
        return sum(type(thing) is Loan for thing in gc.get_objects())  # and not lazy modules

    together(send, lambda: b.until_deliveries(count))
    deadline = time.monotonic() + terms.beat_s / 2
    while num_kept() * (1 << 20) > 2 * ACK_BYTES:  # the last receipts are on their way
        assert time.monotonic() < deadline, num_kept()
        time.sleep(0.01)


# -- peers that cheat ------------------------------------------------------------------------------


def cheats(me: int, other: int):
    yield "data", Data(other, None, 1, (), b"forged"), b""
    yield "credit", Credit(other, me, 1, 1), b""
    yield "sizes", Data(me, None, 1, (5,), b"sizes"), b"123"
    yield "payload", Beat(1), b"123"


@pytest.mark.parametrize("which", ["data", "credit", "sizes", "payload"])
def test_a_peer_that_cheats_is_dismissed(hubs, links, caplog, which):
    hub = hubs(insecure=True)
    one = Reader(links(hub.address, "one"))
    cheat = PeerId("cheat", 12345)
    with Stranger(hub.address) as stranger:
        stranger.come_in(cheat)
        one.until_view(lambda view: cheat in view.peers())
        (frame,) = [f for f in cheats(12345, one.link.me.incarnation) if f[0] == which]
        stranger.say(*frame[1:])
        assert "protocol" in stranger.hear(Dismissal).reason
        one.until_without(cheat)
    assert not one.deliveries
    assert logged(caplog, "cheat", "broke the protocol")


def test_an_oversized_frame_is_dismissed_before_it_is_read(hubs, links):
    hub = hubs(insecure=True)
    one = Reader(links(hub.address, "one"))
    cheat = PeerId("cheat", 12345)
    with Stranger(hub.address) as stranger:
        stranger.come_in(cheat)
        one.until_view(lambda view: cheat in view.peers())
        big = STEADY.part_bytes + 1
        stranger.sock.sendall(SCHEMA.encode(Data(12345, None, 1, (big,), b""), big))
        assert "protocol" in stranger.hear(Dismissal).reason
        one.until_without(cheat)


@pytest.mark.parametrize(
    "peer",
    [
        PeerId("two\nlines", 5),
        PeerId("", 5),
        PeerId("x" * 101, 5),
        PeerId("zero", 0),
        PeerId("n", -1),
    ],
    ids=lambda peer: repr(peer.name[:10]),
)
def test_a_peer_with_a_name_that_others_could_not_bear_is_refused(hubs, caplog, peer):
    hub = hubs(insecure=True)
    with Stranger(hub.address) as stranger:
        stranger.say(Hello("run", peer, "", STEADY, "0"))
        assert stranger.hear(Refusal).code == "name"
    assert logged(caplog, "turned away")
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_a_view_of_a_full_hub_fits_into_a_frame():
    members = tuple(
        Member(
            PeerId("x" * 96 + f"{i:04}", (1 << 63) - 1 - i), PeerState.WATCHING, ViewNumber(9, 999)
        )
        for i in range(HubLimits().peers)
    )
    view = View(ViewNumber(9, 9999), members, ViewNumber(9, 999), members, members[0].peer)
    assert len(SCHEMA.encode(NewView(view))) <= HEADER_BYTES


# -- coming back -----------------------------------------------------------------------------------


def test_only_its_owner_resumes_a_session(hubs, links):
    hub = hubs(insecure=True)
    one = Reader(links(hub.address, "one"))
    with Stranger(hub.address) as stranger:
        back = Return(b"0" * 16, 0, ViewNumber(1, 1), PeerState.ACTIVE)
        stranger.say(Hello("run", one.link.me, "", STEADY, "0", back))
        assert stranger.hear(Dismissal).reason
    with Stranger(hub.address) as stranger:
        stranger.say(Hello("run", one.link.me, "", STEADY, "0"))
        assert stranger.hear(Refusal).code == "incarnation"
    two = Reader(links(hub.address, "two"))
    one.until_view(lambda view: two.link.me in view.peers())
    one.link.send(two.link.me, b"still here")
    two.until_message(b"still here")


def test_the_newest_connection_of_a_session_counts(hubs, links):
    hub = hubs(insecure=True)
    one = Reader(links(hub.address, "one"))
    me = PeerId("raw", 777)
    with ExitStack() as stack:
        first = stack.enter_context(Stranger(hub.address))
        welcome = first.come_in(me)
        one.until_view(lambda view: me in view.peers())
        first.say(Data(777, None, 1, (), b"one"))
        one.until_message(b"one")
        first.sock.sendall(SCHEMA.encode(Data(777, None, 2, (4,), b"half"), 4) + b"12")
        older = first
        for _ in range(3):
            newer = stack.enter_context(Stranger(hub.address))
            back = Return(welcome.session, 0, ViewNumber(1, 1), PeerState.WATCHING)
            again = newer.come_in(me, back=back)
            assert (again.resumed, again.received) == (True, 1)
            assert older.is_hung_up()
            older = newer
        older.hear(NewView)  # what it has not confirmed is sent again
        older.say(Data(777, None, 2, (4,), b"whole"), b"1234")
        assert bytes(one.until_message(b"whole").buffers[0]) == b"1234"
    assert [d.message for d in one.deliveries] == [b"one", b"whole"]


def test_a_session_that_claims_frames_it_never_got_is_ended(hubs, links):
    hub = hubs(insecure=True)
    # It comes back within its grace, also where a connection takes longer than usual.
    one = Reader(links(hub.address, "one", terms=PATIENT))
    me = PeerId("raw", 777)
    with Stranger(hub.address) as stranger:
        welcome = stranger.come_in(me)
        one.until_view(lambda view: me in view.peers())
    with Stranger(hub.address) as stranger:
        back = Return(welcome.session, 10_000, ViewNumber(1, 1), PeerState.WATCHING)
        stranger.say(Hello("run", me, "", STEADY, "0", back))
        assert "resumed" in stranger.hear(Dismissal).reason


def test_a_hub_with_a_memory_is_the_same_hub_after_a_restart(hubs, links, tmp_path):
    state = tmp_path / "state"
    hub = hubs(state=state)
    code = hub.address.code()
    reader = Reader(links(hub.address, "one"))
    before = activate(reader)
    bind = f"127.0.0.1:{hub.address.port}"
    hub.close()
    hub = hubs(bind, state=state)
    assert hub.address.code() == code
    view = reader.until_view(lambda view: view.number.era > before.number.era)
    assert view.cut == view.number
    assert view.peers(PeerState.ACTIVE) == (reader.link.me,)
    assert view.founder is None
    files = [path for path in state.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"key.pem", "cert.pem", "token", "run.json", "lock"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_hub_without_a_memory_takes_its_peers_back_too(hubs, links):
    hub = hubs(insecure=True)
    # One lease after the first of them it goes on without those who have not come back. They look
    # for it in pauses of up to a second: it must not be over before the last one's.
    terms = msgspec.structs.replace(QUICK, lease_s=5.0)
    readers = [Reader(links(hub.address, f"p{i}", terms=terms)) for i in range(3)]
    before = activate(*readers)
    bind = f"127.0.0.1:{hub.address.port}"
    hub.close()
    hubs(bind, insecure=True)
    for reader in readers:
        view = reader.until_view(lambda view: view.number > before.number)
        assert view.cut == view.number
        assert set(view.peers(PeerState.ACTIVE)) == {r.link.me for r in readers}


def test_one_that_does_not_come_back_is_out_after_a_lease(hubs, links, tmp_path):
    hub = hubs(insecure=True, state=tmp_path / "state")
    stays, goes = (Reader(links(hub.address, name, terms=QUICK)) for name in ("stays", "goes"))
    before = activate(stays, goes)
    hub.close()
    goes.link.close()
    hubs(f"127.0.0.1:{hub.address.port}", insecure=True, state=tmp_path / "state")
    stays.link.tell(Leaving())  # said while the hub collects: it counts afterwards
    view = stays.until_view(lambda view: view.number > before.number)
    assert view.number.era > before.number.era
    assert view.cut == view.number
    assert {m.peer: m.state for m in view.roster} == {stays.link.me: PeerState.ACTIVE}
    view = stays.until_view(lambda view: view.roster[0].state is PeerState.LEAVING)
    assert view.number.era > before.number.era


def test_a_watching_peer_becomes_active_after_a_restart(hubs, links, tmp_path):
    hub = hubs(insecure=True, state=tmp_path / "state")
    reader = Reader(links(hub.address, "one"))
    hub.close()
    hubs(f"127.0.0.1:{hub.address.port}", insecure=True, state=tmp_path / "state")
    reader.until(lambda event: isinstance(event, Gap))
    activate(reader)


def test_flush_does_not_wait_for_frames_of_an_earlier_life(hubs, links, tmp_path):
    hub = hubs(insecure=True, state=tmp_path / "state")
    reader = Reader(links(hub.address, "one"))
    before = activate(reader)
    for _ in range(100):
        reader.link.send(None, b"to nobody")
    reader.link.flush(PATIENCE_S)
    hub.close()
    for _ in range(10):
        reader.link.send(None, b"lost")

    def flush() -> None:
        reader.link.flush(PATIENCE_S)

    def restart() -> None:
        hubs(f"127.0.0.1:{hub.address.port}", insecure=True, state=tmp_path / "state")

    together(flush, restart)
    reader.until_view(lambda view: view.number > before.number)


def test_peers_of_a_hub_that_is_gone_give_up(hubs, links):
    hub = hubs(insecure=True)
    readers = [Reader(links(hub.address, f"p{i}", outage_s=0.5)) for i in range(2)]
    activate(*readers)
    hub.close()
    start_s = time.monotonic()
    for reader in readers:
        assert isinstance(reader.until_error(), LinkBroken)
        with pytest.raises(LinkBroken):
            reader.link.send(None, b"anybody?")
        with pytest.raises(LinkBroken):
            reader.link.flush(PATIENCE_S)
    assert time.monotonic() - start_s < PATIENCE_S / 2


def test_what_is_kept_for_a_hub_that_is_gone_is_bounded(hubs, links):
    hub = hubs(insecure=True)
    one = links(hub.address, "one", outage_s=1.0)
    data = bytes(STEADY.part_bytes)
    hub.close()
    sent = 0
    with suppress(LinkBroken):
        while sent < 50 * STEADY.watch_bytes:  # nobody's window holds it back: it is alone
            one.send(None, b"", [data])
            sent += len(data)
    assert sent <= 2 * STEADY.watch_bytes


@pytest.mark.parametrize("blocked_in", ["send", "receive", "flush"])
def test_close_while_the_network_stands_still(hubs, links, blocked_in):
    """A frame is half written, and the hub takes no more."""
    hub = hubs(insecure=True)
    terms = msgspec.structs.replace(STEADY, window_bytes=1 << 30, part_bytes=1 << 20)
    with Proxy("127.0.0.1", hub.address.port) as proxy:
        one = links(hub.address, "one", terms=terms)
        far = links(dataclasses.replace(hub.address, port=proxy.port), "far")
        Reader(one).until_view(lambda view: far.me in view.peers())
        reader = Reader(far)
        reader.settle(lambda view: far.me in view.peers())
        proxy.stall()
        inside = threading.Event()

        def work() -> None:
            inside.set()
            if blocked_in == "receive":
                reader.until(lambda event: False)
            for _ in range(50):
                far.send(one.me, b"", [bytes(1 << 20)])
                if blocked_in == "flush":
                    far.flush()

        def blocked() -> None:
            with pytest.raises(LinkClosed):
                work()

        def close() -> float:
            inside.wait()
            time.sleep(0.5)  # until the socket's buffers are full
            start_s = time.monotonic()
            far.close()
            return time.monotonic() - start_s

        _, took_s = together(blocked, close)
    assert took_s < PATIENCE_S / 2


def test_an_error_in_place_ends_the_link_with_that_error(hubs, caplog):
    hub = hubs(insecure=True)

    def place(sender, message, sizes):
        raise KeyError("no such tensor")

    url = url_of(hub.address)
    with open_link(url, run="run") as one, open_link(url, run="run", place=place) as two:
        Reader(one).until_view(lambda view: two.me in view.peers())
        one.send(two.me, b"", [b"123"])
        error = Reader(two).until_error()
        assert isinstance(error, LinkBroken)
        assert "no such tensor" in str(error)
    assert logged(caplog, "failed")


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here: NOT TESTED")
@pytest.mark.parametrize(
    ("bind", "shown"),
    [("[::1]:0", "::1"), ("[::]:0", None)],  # None: a guess, an IPv4 address
)
def test_it_listens_at_addresses_of_ipv6(hubs, links, bind, shown):
    """And is found by the code that it gives, whatever kind of address is in that."""
    hub = hubs(bind)
    assert shown in (None, hub.address.host)
    assert hub.near.host == "::1"
    ends = [links(address, name) for address, name in [(hub.near, "one"), (hub.address, "two")]]
    Reader(ends[0]).until_view(lambda view: ends[1].me in view.peers())


def test_two_hubs_do_not_share_a_state(tmp_path):
    with Hub("127.0.0.1:0", state=tmp_path / "s"):
        with pytest.raises(SettingsError, match="another hub is using") as caught:
            Hub("127.0.0.1:0", state=tmp_path / "s")
        assert "--state" in str(caught.value)
    Hub("127.0.0.1:0", state=tmp_path / "s").close()


def test_a_port_that_is_taken(tmp_path):
    with Hub("127.0.0.1:0", insecure=True) as hub:
        bind = f"127.0.0.1:{hub.address.port}"
        with pytest.raises(LinkBroken, match="cannot listen"):
            Hub(bind, state=tmp_path / "s")
        Hub("127.0.0.1:0", state=tmp_path / "s").close()  # its state is free again
