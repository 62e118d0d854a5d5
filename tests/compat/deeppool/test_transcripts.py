"""cpprt<slot>.out: whole, in order, and true about how a job has ended; the logs are real files."""

import time

import pytest

from manyhands.cluster.errors import NoSuchJob, StoreError
from manyhands.cluster.job import Job, Place, Spec, State, moved
from manyhands.cluster.logs import LogName, Logs
from manyhands.compat.deeppool.transcripts import Transcripts, ending_line

PATIENCE_S = 60.0
NOW_NS = 1677704218374995837
SLOTS = [("a", 0), ("a", 1), ("b", 0)]


class Board:
    """Jobs as a coordinator has them, and who listens."""

    def __init__(self):
        self._jobs, self._listeners = {}, []
        self.is_closed = False

    def put(self, job):
        self._jobs[job.id] = job
        for heard in self._listeners:
            heard({job.id, "a host"})
        return job

    def job(self, id):
        if self.is_closed:
            raise StoreError("closed")
        if id not in self._jobs:
            raise NoSuchJob(id)
        return self._jobs[id]

    def jobs(self, *, states=(), limit=None):
        return [job for job in self._jobs.values() if job.state in states]

    def listen(self, heard):
        self._listeners.append(heard)
        return lambda: self._listeners.remove(heard)

    def ring(self, topics):
        for heard in self._listeners:
            heard(topics)


class Desk:
    """A board, logs, and transcripts of them."""

    def __init__(self, folder):
        self.board, self.folder = Board(), folder
        self.logs = Logs(folder, reserve_bytes=0)
        self.said = []
        self.transcripts = Transcripts(
            self.board, self.logs, folder, lambda: SLOTS, self.said.append, clock_ns=lambda: NOW_NS
        )

    def waits(self, id):
        return self.board.put(Job(id=id, spec=Spec(command=("x",)), submitted_s=0.0))

    def starts(self, job, *places, attempt=0):
        where = tuple(Place(host, slots) for host, slots in places)
        placed = moved(job, State.STARTING, "placed", places=where, attempt=attempt)
        return self.board.put(moved(placed, State.RUNNING, "runs"))

    def writes(self, job, text, rank=0):
        name = LogName(job.id, job.attempt, rank)
        self.logs.append(name, self.logs.length(name), text.encode())

    def ends(self, job, state=State.SUCCEEDED):
        return self.board.put(moved(job, state, "ended", ended_s=1.0))

    def preempted(self, job):
        out = {"places": (), "started_s": None, "preemptions": 1}
        gone = moved(moved(job, State.PREEMPTED, "makes room"), State.PENDING, "waits", **out)
        return self.board.put(gone)

    def text(self, slot, wanted):
        """The file of a slot, which is to become this."""
        deadline_s = time.monotonic() + PATIENCE_S
        place = self.folder / f"cpprt{slot}.out"
        while (text := place.read_text()) != wanted and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert text == wanted


@pytest.fixture
def desk(tmp_path):
    made = Desk(tmp_path)
    with made.transcripts:
        yield made
    assert made.board._listeners == []


def line(job, end="completed", remaining=0):
    return ending_line(NOW_NS, job, end, remaining=remaining)


def test_the_line_is_deeppools():
    assert line(3) == (
        "1677704218.374995837 job 3 in poll NOTICE[1]: Removed the completed job. Remaining: 0\n"
    )


def test_each_slot_has_its_rank(desk):
    job = desk.starts(desk.waits(1), ("b", (0,)), ("a", (1, 0)))
    desk.writes(job, "zero\n", rank=0)
    desk.writes(job, "one\n", rank=1)
    desk.writes(job, "two", rank=2)  # without the end of a line
    desk.text(2, "zero\n")
    desk.text(1, "one\n")
    desk.text(0, "two")
    desk.ends(job)
    desk.text(2, "zero\n" + line(1))
    desk.text(1, "one\n" + line(1))
    desk.text(0, "two\n" + line(1))


def test_jobs_follow_each_other_and_the_rest_is_counted(desk):
    first, second = desk.waits(1), desk.waits(2)
    desk.waits(3)
    first = desk.starts(first, ("a", (0,)))
    desk.writes(first, "first\n")
    desk.ends(first)
    desk.text(0, one := "first\n" + line(1, remaining=2))
    second = desk.starts(second, ("a", (0,)))
    desk.writes(second, "second\n")
    desk.text(0, one + "second\n")
    desk.ends(second, State.FAILED)
    desk.text(0, one + "second\n" + line(2, "failed", remaining=1))
    desk.text(1, "")


@pytest.mark.parametrize(
    ("state", "end"),
    [(State.TIMEOUT, "timed out"), (State.CANCELLED, "cancelled"), (State.FAILED, "failed")],
)
def test_ends_that_are_none_of_success(desk, state, end):
    desk.ends(desk.starts(desk.waits(1), ("a", (0,))), state)
    desk.text(0, line(1, end))


def test_an_attempt_that_made_room_and_the_next_one(desk):
    job = desk.starts(desk.waits(1), ("a", (0,)))
    desk.writes(job, "begins\n")
    desk.text(0, "begins\n")
    job = desk.preempted(job)
    desk.text(0, "begins\n" + line(1, "preempted", remaining=1))
    job = desk.starts(job, ("a", (1,)), attempt=1)
    desk.writes(job, "goes on\n")
    desk.ends(job)
    desk.text(1, "goes on\n" + line(1))
    desk.text(0, "begins\n" + line(1, "preempted", remaining=1))


def test_a_next_attempt_of_which_nobody_saw_the_end_of_the_last(desk):
    job = desk.starts(desk.waits(1), ("a", (0,)))
    desk.writes(job, "begins\n")
    desk.text(0, "begins\n")
    again = moved(moved(job, State.NODE_FAIL, "lost"), State.PENDING, "waits", places=())
    job = desk.starts(again, ("a", (0,)), attempt=1)  # the state between was never told
    desk.writes(job, "again\n")
    desk.text(0, "begins\n" + line(1, "preempted", remaining=1) + "again\n")


def test_a_job_that_never_started_leaves_no_line(desk):
    desk.ends(desk.waits(1), State.CANCELLED)
    desk.ends(desk.starts(desk.waits(2), ("a", (0,))))
    desk.text(0, line(2))


def test_hosts_that_come_later_have_the_next_numbers(desk):
    desk.ends(desk.starts(desk.waits(1), ("stranger", (5,))))
    deadline_s = time.monotonic() + PATIENCE_S
    while not (desk.folder / "cpprt3.out").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    desk.text(3, line(1))


def test_everything_is_looked_at_where_nobody_says_what_changed(desk):
    job = desk.starts(desk.waits(1), ("a", (0,)))
    desk.text(0, "")
    desk.board._jobs[1] = moved(job, State.SUCCEEDED, "ended")  # in silence
    desk.board.ring({17})  # one that never was
    desk.board.ring(None)
    desk.text(0, line(1))


def test_a_restart_begins_its_files_anew_and_takes_up_what_runs(tmp_path):
    (tmp_path / "cpprt0.out").write_text("of yesterday\n")
    (tmp_path / "cpprt17.out").write_text("of yesterday\n")
    (tmp_path / "mine.out").write_text("of yesterday\n")
    desk = Desk(tmp_path)
    job = desk.starts(desk.waits(1), ("a", (0,)))
    desk.writes(job, "since this morning\n")
    with desk.transcripts:
        desk.text(0, "since this morning\n")
        desk.ends(job)
    desk.text(0, "since this morning\n" + line(1))
    assert not (tmp_path / "cpprt17.out").exists()
    assert (tmp_path / "mine.out").exists()


def test_leaving_writes_what_is_left(tmp_path):
    desk = Desk(tmp_path)
    with desk.transcripts:
        job = desk.starts(desk.waits(1), ("a", (0,)))
        desk.writes(job, "last words\n")
        desk.ends(job)
    assert (tmp_path / "cpprt0.out").read_text() == "last words\n" + line(1)


def test_where_files_cannot_be_written_the_cluster_goes_on(tmp_path):
    desk = Desk(tmp_path)
    with desk.transcripts:
        (tmp_path / "cpprt0.out").unlink()
        (tmp_path / "cpprt0.out").mkdir()
        desk.starts(desk.waits(1), ("a", (0,)))
    assert len(desk.said) == 1
    assert desk.said[0].startswith("cpprt files are not written any more: ")


def test_a_store_that_is_closed_is_the_end(tmp_path):
    desk = Desk(tmp_path)
    with desk.transcripts:
        desk.board.is_closed = True
        desk.waits(1)
    assert desk.said == []


def test_a_store_that_fails_keeps_no_word_from_its_file(tmp_path):
    desk = Desk(tmp_path)
    with desk.transcripts:
        job = desk.starts(desk.waits(1), ("a", (0,)))
        desk.writes(job, "one\n")
        desk.text(0, "one\n")
        desk.board.is_closed = True
        desk.board.ring({1})
        desk.writes(job, "two\n")
        desk.text(0, "one\ntwo\n")
    assert desk.said == []
