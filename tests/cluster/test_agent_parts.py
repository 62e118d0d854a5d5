"""The parts of an agent that need no process: lease, line, ledger, comparison, words."""

from __future__ import annotations

import os
import queue
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from manyhands.cluster.account import account_of
from manyhands.cluster.attempt import KEEPER_PATIENCE_S, Attempt, order_of
from manyhands.cluster.comparison import Deed, Held, Verb, compare
from manyhands.cluster.environment import RESERVED, of_user, rank_environments, scrubbed
from manyhands.cluster.errors import BadJob
from manyhands.cluster.lease import Lease
from manyhands.cluster.ledger import AlreadyBegun, Key, Ledger, Record, StateHeld
from manyhands.cluster.line import Line, Rejected, Renewed, Reported, Wanted, Welcomed
from manyhands.cluster.messages import Hello, Kind, Phase, Slot, Status
from manyhands.cluster.rest import Rest
from manyhands.cluster.submission import checked
from manyhands.cluster.uploads import Flooded, Uploads, _Upload
from manyhands.cluster.words import MAX_WORDS_BYTES, last_words, words_of
from manyhands.core.errors import ManyhandsError, UsageError
from tests.cluster.offices import PATIENCE_S, FakeOffice, want

if TYPE_CHECKING:
    from pathlib import Path

KEY = Key("c1", 1, 0)
WANT = want(("x",))


# The lease


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lease_counts_from_the_request() -> None:
    clock = Clock()
    lease = Lease(clock)
    assert not lease.holds
    assert not lease.answered(99.0)  # before the Welcome: how long would it be?
    clock.now_s = 104.0
    assert lease.welcomed(10.0, asked_s=100.0)
    assert lease.until_s == 110.0
    assert not lease.answered(99.0)  # a slow answer to an old question
    assert lease.until_s == 110.0
    assert lease.answered(103.0)
    assert lease.until_s == 113.0


def test_a_lapsed_lease_is_not_renewed_by_an_answer_that_comes_late() -> None:
    """As on waking from sleep: the answer was there all the time."""
    clock = Clock()
    lease = Lease(clock)
    lease.welcomed(10.0, asked_s=100.0)
    clock.now_s = 110.0
    assert lease.lapsed
    assert not lease.answered(109.0)
    assert not lease.welcomed(10.0, asked_s=109.9)
    assert not lease.holds
    lease.begin_again()
    assert not lease.holds
    assert not lease.lapsed
    assert lease.answered(110.0)
    assert lease.holds


def test_an_answer_that_took_a_lease_gives_none() -> None:
    clock = Clock()
    lease = Lease(clock)
    clock.now_s = 111.0
    assert not lease.welcomed(10.0, asked_s=100.0)
    assert not lease.holds


def test_a_lease_that_is_granted_anew_may_be_shorter() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.welcomed(600.0, asked_s=100.0)
    clock.now_s = 111.0
    assert lease.welcomed(30.0, asked_s=110.0)
    assert lease.until_s == 140.0
    assert not lease.answered(105.0)  # asked of the one before
    assert lease.until_s == 140.0
    assert lease.answered(111.0)
    assert lease.until_s == 141.0
    clock.now_s = 141.0
    assert not lease.welcomed(10.0, asked_s=140.0)  # lapsed stays lapsed
    assert lease.lapsed


# The line


def test_status_alone_keeps_the_lease_while_wants_are_held_back() -> None:
    clock, events = Clock(), queue.SimpleQueue()
    office = FakeOffice(lease_s=0.2)  # of the clock, which the test moves; a fraction is waited
    lease = Lease(clock)
    hello = Hello(version="1", host="h", agent="a", address="x", slots=(), pid=1)
    with Line(lambda: office, hello, lease, events.put) as line:
        assert isinstance(events.get(timeout=PATIENCE_S), Renewed)
        assert events.get(timeout=PATIENCE_S) == Welcomed(1, office.hello(hello))
        assert line.report(1, Status(agent="a")) == 1
        seen = []
        while not {Reported, Wanted} <= {type(event) for event in seen}:
            seen.append(events.get(timeout=PATIENCE_S))
        clock.now_s += 0.1
        while not isinstance(events.get(timeout=PATIENCE_S), Renewed):
            pass  # a Status that says nothing new
        assert lease.until_s == pytest.approx(clock.now_s + 0.2)
        office.close()


def test_a_refusal_that_lasts_ends_the_line() -> None:
    events, office = queue.SimpleQueue(), FakeOffice()
    hello = Hello(version="1", host="h", agent="a", address="x", slots=(), pid=1)
    office.refused["status"] = "no"
    with Line(lambda: office, hello, Lease(), events.put) as line:
        while not isinstance(event := events.get(timeout=PATIENCE_S), Rejected):
            if isinstance(event, Welcomed):
                line.report(event.session, Status(agent="a"))
        assert event.error.code == "no"
        assert len(office.hellos) == 3
        office.close()


class Connected:
    """A line that always has a connection."""

    def wait_connected(self, timeout_s=None):
        return 1

    def prove(self):
        return True


@pytest.fixture
def disk(monkeypatch):
    """How much of it is free: the test says."""
    free = SimpleNamespace(f_bavail=1 << 30, f_frsize=1)
    monkeypatch.setattr("manyhands.cluster.uploads.os.statvfs", lambda path: free)
    return free


@pytest.fixture
def looked():
    """Uploads whose looks the test takes itself, with what they told."""
    events, office = queue.SimpleQueue(), FakeOffice()
    uploads = Uploads(lambda: office, Connected(), "h", "a", events.put, reserve_bytes=2_000_000)
    yield SimpleNamespace(keep_room=uploads._keep_room, cut=uploads._cut, told=events)
    office.close()


def grow(log, more) -> None:
    with log.open("ab") as file:
        file.write(b"x" * more)


def test_a_log_that_takes_the_last_room_of_the_disk_ends_its_rank(tmp_path, disk, looked):
    """The one that grows fastest, in two looks, once told; and it is cut, but for what was sent."""
    long, short, key = tmp_path / "long", tmp_path / "short", Key("c", 1, 0)
    open_ones = [_Upload(key, 0, short), _Upload(key, 1, long, offset=500)]
    looked.keep_room(open_ones)  # neither is there yet
    grow(long, 5_000_000)
    grow(short, 2_500_000)
    disk.f_bavail = 2_000_000
    looked.keep_room(open_ones)
    grow(long, 600_000)
    grow(short, 400_000)
    disk.f_bavail = 1_000_000
    looked.keep_room(open_ones)
    assert looked.told.empty()
    disk.f_bavail -= 4096  # of somebody else's
    for _ in range(2):
        looked.keep_room(open_ones)
    assert looked.told.get(timeout=0) == Flooded(key, 1, open_ones[1].why)
    assert looked.told.empty()
    open_ones[1].ended = True
    looked.cut(open_ones[1])
    text = long.read_bytes()
    assert len(text.rstrip(b"x")) < 5_600_000 - 1_000_000
    assert text.endswith(b"the rest of this log is gone\n")
    open_ones[1].offset, open_ones[1].why = 100_000_000, "again"
    looked.cut(open_ones[1])
    assert long.read_bytes().startswith(text)


def test_a_long_log_is_let_be_while_something_else_fills_the_disk(tmp_path, disk, looked):
    log = tmp_path / "log"
    grow(log, 6_000_000)
    upload = _Upload(Key("c", 1, 0), 0, log)
    disk.f_bavail = 3_000_000
    for _ in range(20):  # it goes on writing, a tenth of what goes
        looked.keep_room([upload])
        grow(log, 15_000)
        disk.f_bavail -= 150_000
    for _ in range(20):  # the disk as it is, and a line now and then
        looked.keep_room([upload])
        grow(log, 100)
        disk.f_bavail -= 100
    assert looked.told.empty()
    for _ in range(4):  # now it is what grows, while others make more room than it takes
        grow(log, 150_000)
        disk.f_bavail += 50_000
        looked.keep_room([upload])
    assert looked.told.empty()
    for _ in range(4):
        grow(log, 150_000)
        disk.f_bavail -= 150_000
        looked.keep_room([upload])
    assert looked.told.get(timeout=0) == Flooded(upload.key, 0, upload.why)


def test_a_log_is_cut_so_that_its_rest_can_be_sent_to_the_same_disk(tmp_path, disk, looked):
    """A copy of each piece is refused where less than the reserve would be left."""
    log = tmp_path / "log"
    grow(log, 12_000_000)
    upload = _Upload(Key("c", 1, 0), 0, log, offset=1_000_000, ended=True, why="it floods")
    disk.f_bavail = 500_000
    looked.cut(upload)
    size = log.stat().st_size
    assert size > 4_000_000  # what can be kept is
    free = 500_000 + 12_000_000 - size
    assert free - (size - upload.offset) > 2_000_000


def test_a_log_that_filled_the_disk_before_it_was_looked_at_is_known(tmp_path, disk, looked):
    log, upload = tmp_path / "log", _Upload(Key("c", 1, 0), 0, tmp_path / "log")
    grow(log, 6_000_000)
    disk.f_bavail = 0
    looked.keep_room([upload])
    assert looked.told.empty()
    looked.keep_room([upload])
    assert looked.told.get(timeout=0) == Flooded(upload.key, 0, upload.why)


@pytest.fixture
def log(tmp_path):
    """A rank's log: `sent(text)` is what an office has of it when it has become that text."""
    path, office, key = tmp_path / "log", FakeOffice(), (KEY.job, KEY.attempt, 0)
    office.hello(Hello(version="1", host="h", agent="a", address="x", slots=(), pid=1))
    uploads = Uploads(lambda: office, Connected(), "h", "a", queue.SimpleQueue().put)
    upload = _Upload(KEY, 0, path)

    def sent(text):
        path.write_bytes(text)  # as a shell does for `> /dev/stderr`
        for _ in range(20):
            if not (uploads._advance(office, upload) or upload.waits):
                return bytes(office.logs[key])
        raise AssertionError("it goes on sending")

    def part(text):
        """One chunk of it, whatever comes of that."""
        path.write_bytes(text)
        uploads._advance(office, upload)

    office.logs[key] = bytearray()
    yield SimpleNamespace(
        sent=sent, part=part, office=office, upload=upload, copy=lambda: office.logs[key]
    )
    office.close()


EMPTIED = b"manyhands: rank 0 has emptied its log, "


@pytest.mark.parametrize("after", [b"two\n", b"two\nthree, which is longer than what was sent\n"])
def test_what_a_rank_writes_after_it_has_emptied_its_log_arrives(log, after):
    """What was sent stays; that something may be missing is said once, though the answer be lost"""
    assert log.sent(b"one\n") == b"one\n"
    log.office.lost_answers["send_log"] = 1
    before, notice, rest = log.sent(after).partition(EMPTIED)
    assert (before, rest.partition(b"\n")[2]) == (b"one\n", after)
    text = log.sent(b"four")
    assert text == before + notice + rest + b"four"
    assert log.sent(b"four, five\n") == text + b", five\n"


def test_a_log_that_is_emptied_when_a_piece_has_arrived_unanswered_goes_on_behind_it(log):
    log.sent(b"one\n")
    log.office.lost_answers["send_log"] = 1
    log.part(b"one\ntwo\n")
    before, _, rest = log.sent(b"three\n").partition(EMPTIED)
    assert (before, rest.partition(b"\n")[2]) == (b"one\ntwo\n", b"three\n")
    log.office.lost_answers["send_log"] = 1
    log.part(b"three\nfour\n")  # what it lacks now is not said a second time
    assert log.sent(b"five\n") == before + EMPTIED + rest + b"four\nfive\n"


def test_an_agent_that_finds_a_log_emptied_sends_it_behind_what_another_has_sent(log):
    log.copy()[:] = b"one\n"
    before, _, rest = log.sent(b"two\n").partition(EMPTIED)
    assert (before, rest.partition(b"\n")[2]) == (b"one\n\n", b"two\n")
    log.copy()[:] = b"of another agent, which goes on" * 9
    log.sent(b"two\nthree\n")
    assert log.upload.settled  # one of the two has to give up


def test_a_copy_that_is_cleared_away_begins_with_what_the_log_has_now(log):
    log.sent(b"one\n")
    log.copy().clear()
    text = log.sent(b"two\n")
    assert text.startswith(EMPTIED)
    assert text.endswith(b"here\ntwo\n")
    log.copy().clear()
    assert log.sent(b"three\n") == b"three\n"


def test_an_attempt_that_has_failed_is_ended_at_once_when_its_log_takes_the_room(tmp_path):
    """Until it ends, nobody else's log is looked at; and what failed first stays the reason."""
    attempt = Attempt(KEY, "h", tmp_path)
    attempt.fail(0, "it floods", 5.0)  # nothing runs yet, or any more
    assert not attempt.stopping
    attempt.phase = Phase.RUNNING
    attempt.note(b'{"failed": {"rank": 1, "exit_code": 3, "at_s": 1.0}}')
    attempt.stop(60.0, 5.0)
    attempt.fail(0, "it floods", 6.0)
    assert attempt.overdue_s == 6.0 + KEEPER_PATIENCE_S
    failure = attempt.holding().failure
    assert (failure.rank, failure.exit_code, failure.words) == (1, 3, "")


# The comparison


@pytest.mark.parametrize(
    ("wants", "held", "expected"),
    [
        ([WANT], {}, [Verb.BEGIN]),
        ([want(("x",), stop=True)], {}, [Verb.DECLINE]),
        ([WANT], {(1, 0): Held(Phase.READY)}, [Verb.START]),
        ([want(("x",), port=0)], {(1, 0): Held(Phase.READY)}, []),
        ([WANT], {(1, 0): Held(Phase.RUNNING)}, []),
        ([WANT], {(1, 0): Held(Phase.ENDED)}, []),
        ([want(("x",), stop=True)], {(1, 0): Held(Phase.READY)}, [Verb.STOP]),
        ([want(("x",), stop=True)], {(1, 0): Held(Phase.RUNNING)}, [Verb.STOP]),
        ([want(("x",), stop=True)], {(1, 0): Held(Phase.RUNNING, stopping=True)}, []),
        ([want(("x",), stop=True)], {(1, 0): Held(Phase.ENDED)}, []),
        ([], {(1, 0): Held(Phase.READY)}, [Verb.STOP]),
        ([], {(1, 0): Held(Phase.RUNNING)}, [Verb.STOP]),
        ([], {(1, 0): Held(Phase.RUNNING, stopping=True)}, []),
        ([], {(1, 0): Held(Phase.ENDED)}, [Verb.FORGET]),
        ([], {(1, 0): Held(Phase.ENDED, log_settled=False)}, []),
    ],
)
def test_what_is_missing(wants, held, expected) -> None:
    assert compare(wants, held, may_start=True) == [Deed(verb, (1, 0)) for verb in expected]


def test_nothing_is_begun_or_started_without_a_lease() -> None:
    assert compare([WANT], {}, may_start=False) == []
    assert compare([WANT], {(1, 0): Held(Phase.READY)}, may_start=False) == []


# The ledger


def test_an_attempt_is_begun_once_even_when_it_is_forgotten(tmp_path) -> None:
    with Ledger(tmp_path) as ledger:
        folder = ledger.begin(KEY, WANT.task)
        assert list(ledger.left()) == [KEY]
        assert ledger.task(KEY).spec == WANT.task.spec
        with pytest.raises(AlreadyBegun, match="job 1, attempt 0 was begun here before"):
            ledger.begin(KEY, WANT.task)
        ledger.forget(KEY)
        assert not folder.exists()
        assert list(ledger.left()) == []
        with pytest.raises(AlreadyBegun):
            ledger.begin(KEY, WANT.task)
        ledger.begin(Key("c2", 1, 0), WANT.task)


def test_no_secret_is_written_down(tmp_path) -> None:
    with Ledger(tmp_path) as ledger:
        task = want(("x",), hub="mh1-hidden", env={"A": "hidden"}).task
        text = (ledger.begin(KEY, task) / "task.json").read_text()
    assert "hidden" not in text
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_folder_keeps_its_id_whoever_works_in_it(tmp_path) -> None:
    with Ledger(tmp_path / "a") as ledger:
        drawn = ledger.id
    assert len(drawn) == 16
    assert (tmp_path / "a" / "id").stat().st_mode & 0o777 == 0o600
    with Ledger(tmp_path / "a") as again, Ledger(tmp_path / "b") as other:
        assert again.id == drawn
        assert other.id not in ("", drawn)


def test_a_folder_that_was_there_stays_as_open_as_it_was(tmp_path) -> None:
    """`--state /tmp`, say."""
    tmp_path.chmod(0o755)
    with Ledger(tmp_path), Ledger(tmp_path / "new"):
        pass
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o77 for path in tmp_path.iterdir()} == {0}


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(UsageError, match=f"belongs to user {tmp_path.stat().st_uid}"):
        Ledger(tmp_path).__enter__()


def test_one_agent_a_folder(tmp_path) -> None:
    with Ledger(tmp_path), pytest.raises(StateHeld, match=f"process {os.getpid()}"):
        Ledger(tmp_path).__enter__()
    with Ledger(tmp_path):
        pass


def test_a_record_that_was_cut_off_says_nothing(tmp_path) -> None:
    with Ledger(tmp_path) as ledger:
        folder = ledger.begin(KEY, WANT.task)
        assert ledger.record(KEY) == Record()
        (folder / "record.json").write_bytes(b'{"groups": [')
        assert ledger.record(KEY) == Record()


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "x" * 200])
def test_the_name_of_a_cluster_is_no_path(tmp_path, name) -> None:
    with Ledger(tmp_path) as ledger, pytest.raises(ManyhandsError, match="no usable name"):
        ledger.begin(Key(name, 1, 0), WANT.task)


def test_a_line_that_is_no_record_changes_nothing(tmp_path) -> None:
    attempt = Attempt(KEY, "h", tmp_path)
    attempt.note(b'{"ends": [{"rank": 0, "exit_code": 0, "at_s": 1.0}]}')
    attempt.note(b"")
    assert [end.rank for end in attempt.holding().ended] == [0]


def test_a_keeper_that_broke_is_told_with_its_last_words(tmp_path) -> None:
    attempt = Attempt(KEY, "h", tmp_path)
    (tmp_path / "keeper.log").write_text("Traceback (most recent call last):\n  x\nOSError: no\n")
    attempt.orphaned = True
    attempt.bury()
    assert attempt.holding().lost == "the keeper was killed: OSError: no"


# The rest


def test_a_host_rests_for_longer_each_time_until_something_has_run() -> None:
    clock = Clock()
    rest = Rest(clock)
    assert rest.until_s is None
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        rest.begin()
        assert rest.until_s == clock.now_s + pause_s
        clock.now_s += pause_s
        assert rest.until_s is None
    rest.forget()
    rest.begin()
    assert rest.until_s == clock.now_s + 1


# Words


def test_the_last_traceback_is_what_counts() -> None:
    log = (
        b"step 1\nTraceback (most recent call last):\n  File a\nKeyError: 'old'\nmore\n"
        b"[rank0]: Traceback (most recent call last):\n[rank0]:   File b\n"
        b"[rank0]: RuntimeError: shapes\n[rank0]: of two lines\n"
    )
    assert last_words(log) == (
        "Traceback (most recent call last):\n  File b\nRuntimeError: shapes\nof two lines"
    )


def test_without_a_traceback_it_is_the_last_lines() -> None:
    lines = [f"line {number}" for number in range(100)]
    assert last_words("\n".join(lines).encode()).splitlines() == lines[-20:]


def test_words_are_short_and_keep_the_error() -> None:
    frames = b"".join(b"  File %d\n" % number for number in range(5000))
    log = (
        b"Traceback (most recent call last):\n" + frames + b"ValueError: here\n" + b"noise\n" * 999
    )
    words = last_words(log)
    assert len(words.encode()) <= MAX_WORDS_BYTES
    assert "ValueError: here" in words


def test_no_secret_is_quoted() -> None:
    log = b"hub mh1-abcDEF_123, agent mhc1-abcDEF_123, amqp://me:pass@host/\n"
    assert last_words(log) == "hub mh1-***, agent mhc1-***, amqp://me:***@host/"


def test_a_secret_that_a_cut_falls_into_is_left_out() -> None:
    words = last_words(b"mh1-" + b"Q" * 3 * MAX_WORDS_BYTES + b" end\n")
    assert words == "end"


def test_bytes_that_are_no_text_are_still_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\xfe" * 100_000 + b"\nbad end\n")
    assert words_of(log) == "bad end"
    assert words_of(tmp_path / "none") == ""


# The environment


def test_gpus_of_an_attempt_are_seen_by_all_its_ranks() -> None:
    slots = [Slot(index, Kind.GPU, f"GPU-{index}") for index in range(4)]
    wanted = want(("x",), ranks=2)
    task = msgspec.structs.replace(wanted.task, ranks=((4, 3), (5, 1)))
    made = rank_environments(
        {"PATH": "/bin"},
        "/venv/bin/python",
        {},
        msgspec.structs.replace(wanted, task=task),
        slots,
        15.0,
    )
    assert [made[rank]["CUDA_VISIBLE_DEVICES"] for rank in (4, 5)] == ["GPU-3,GPU-1"] * 2
    assert [made[rank]["LOCAL_RANK"] for rank in (4, 5)] == ["0", "1"]
    assert made[4]["PATH"] == "/venv/bin:/bin"
    assert made[4].keys() & RESERVED == RESERVED - {
        *("MANYHANDS_ATTEMPT", "MANYHANDS_HOST", "MANYHANDS_BATCH"),
        *("MANYHANDS_URL", "MANYHANDS_RUN", "MANYHANDS_CORES"),
    }


def test_what_a_job_sets_does_not_hide_what_is_ours() -> None:
    wanted = want(("x",), env={"OMP_NUM_THREADS": "9", "RANK": "9"})
    made = rank_environments({}, "/p", {}, wanted, [Slot(0, Kind.CPU, "0-1")], 15.0)
    assert (made[0]["OMP_NUM_THREADS"], made[0]["RANK"]) == ("9", "0")


def test_a_rank_is_told_of_the_cores_that_it_is_pinned_to() -> None:
    slots = [Slot(0, Kind.CPU, "0-1,4"), Slot(1, Kind.CPU, "")]
    made = rank_environments({}, "/p", {}, want(("x",), ranks=2), slots, 15.0)
    assert [made[rank].get("MANYHANDS_CORES") for rank in range(2)] == ["3", None]


@pytest.mark.parametrize(("env", "few"), [({}, "3"), ({"MANYHANDS_MIN_PEERS": "1"}, "1")])
def test_a_run_begins_with_all_ranks_unless_the_job_says_otherwise(env, few) -> None:
    wanted = want(("x",), ranks=3, hub="mh1-code", env=env)
    assert checked(wanted.task.spec).env == env
    slots = [Slot(index, Kind.CPU, "") for index in range(3)]
    made = rank_environments({}, "/p", {}, wanted, slots, 15.0)
    assert [made[rank]["MANYHANDS_MIN_PEERS"] for rank in range(3)] == [few] * 3


@pytest.mark.parametrize(("env", "outage"), [({}, "660"), ({"MANYHANDS_OUTAGE": "5"}, "5")])
def test_ranks_look_for_their_hub_for_as_long_as_they_live_without_a_coordinator(env, outage):
    wanted = want(("x",), hub="mh1-code", env=env)
    made = rank_environments({}, "/p", {}, wanted, [Slot(0, Kind.CPU, "")], 600.0)
    assert made[0]["MANYHANDS_OUTAGE"] == outage
    alone = rank_environments({}, "/p", {}, want(("x",)), [Slot(0, Kind.CPU, "")], 600.0)
    assert "MANYHANDS_OUTAGE" not in alone[0]


def test_a_python_that_is_closed_to_the_jobs_user_is_not_passed_over_for_another(
    tmp_path, monkeypatch
) -> None:
    """exec passes over what is closed on the PATH, and takes a path as it is."""
    python = tmp_path / "python"
    python.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    user = {"uid": 65534, "gid": 65534, "groups": [65534]}

    def first_word(command, user, **env):
        wanted, slots = want(command, env=env), [Slot(0, Kind.CPU, "")]
        given = {"folder": tmp_path, "workdir": "/", "lease_until_s": 0.0, "user": user}
        return order_of(wanted, {0: {}}, slots, **given)["command"][0]

    assert first_word(("python", "x.py"), user) == str(python)
    assert first_word(("python", "x.py"), None) == "python"
    assert first_word(("sh", "-c", "true"), user) == "sh"
    assert first_word(("./python",), user) == "./python"
    # A job that brings a PATH of its own has said where its programs are.
    assert first_word(("python", "x.py"), user, PATH="/opt/theirs/bin:/bin") == "python"


def test_scrubbing_takes_ours_and_leaves_the_users() -> None:
    environment = {
        "MANYHANDS_TOKEN": "t",
        "MODEL_TOKEN": "t",
        "CODE": "mhc1-abcdefgh",
        "URL": "join mh1-abcdefgh",
        "HIDDEN": "a-t0ken-b",
        "HTTPS_PROXY": "http://me:pass@proxy",
        "EMPTY": "",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SLURM_PROCID": "3",
        "PMI_RANK": "3",
        "NOTIFY_SOCKET": "/run/systemd/notify",
    }
    assert set(scrubbed(environment, ["t0ken", ""])) == {"HTTPS_PROXY", "EMPTY"}


def test_an_empty_path_does_not_mean_the_jobs_own_folder() -> None:
    made = rank_environments(
        {"PATH": ""}, "/venv/bin/python", {}, WANT, [Slot(0, Kind.CPU, "")], 15.0
    )
    assert made[0]["PATH"] == f"/venv/bin:{os.defpath}"


def test_another_user_has_nothing_of_roots_session() -> None:
    root = {"SHELL": "/bin/sh", "MAIL": "x", "SSH_AUTH_SOCK": "x", "DBUS_SESSION_BUS": "x"}
    made = of_user({**root, "XDG_RUNTIME_DIR": "x", "LANG": "C"}, "me", "/home/me")
    assert made == {"LANG": "C", "HOME": "/home/me", "USER": "me", "LOGNAME": "me"}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_no_job_may_set_what_is_ours(name) -> None:
    with pytest.raises(BadJob, match=name):
        checked(want(("x",), env={name: "1"}).task.spec)


# Another user


def test_only_root_becomes_another_user(monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="only root can run jobs as another user"):
        account_of("nobody")
    with pytest.raises(UsageError, match="there is no user 'no-such-user'"):
        account_of("no-such-user")
    assert account_of(None) is None
