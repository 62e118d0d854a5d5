"""How an operation's end is told: threads, chains of callbacks, errors that C++ can read."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from manyhands.collectives.backend.exchange import Key
from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.collectives.backend.session import Session
from manyhands.collectives.backend.work import Completer, Promise, Sequel, current_sequel
from manyhands.core.errors import LinkError


@pytest.fixture
def completer():
    made = Completer("test")
    yield made
    made.close()


def test_no_act_waits_for_another(completer):
    """Each of these can only end when all have begun."""
    together = threading.Barrier(20, timeout=30)
    ended = threading.Semaphore(0)

    def act():
        together.wait()
        ended.release()

    for _ in range(20):
        completer.put(act)
    for _ in range(20):
        assert ended.acquire(timeout=30)


def test_acts_that_do_not_wait_share_threads(completer):
    before = threading.active_count()
    ended = threading.Semaphore(0)
    for _ in range(2000):
        completer.put(ended.release)
    for _ in range(2000):
        assert ended.acquire(timeout=30)
    assert threading.active_count() - before < 200


def test_what_was_put_is_run_before_the_end(completer):
    done = []
    for number in range(100):
        completer.put(lambda n=number: done.append(n))
    completer.close()
    assert sorted(done) == list(range(100))
    completer.put(lambda: done.append("late"))
    assert done[-1] == "late"


def test_ctrl_c_ends_a_wait():
    """By itself the future waits in C++, where no signal handler runs."""
    promise, main = Promise(None), threading.main_thread().ident
    assert main is not None
    # Whoever runs the tests in the background may have it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            promise.wait()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    promise.keep([torch.ones(1)])
    assert promise.wait()


def test_a_wait_is_not_behind_callbacks():
    """One of them may wait for what its user does after the wait."""
    promise, waited = Promise(None), threading.Event()
    seen = promise.get_future().then(lambda future: waited.wait(30) and future.value())
    keeping = threading.Thread(target=promise.keep, args=([torch.ones(1)],))
    keeping.start()
    assert promise.wait(timedelta(seconds=20))
    waited.set()
    keeping.join()
    assert seen.wait()


def test_a_promise_that_is_kept():
    promise = Promise(None)
    tensor = torch.ones(3)
    assert not promise.is_completed()
    with pytest.raises(dist.DistBackendError, match=r"not finished within 0\.01 s"):
        promise.wait(timedelta(milliseconds=10))
    chained = promise.get_future().then(lambda future: future.value()[0] + 1)
    promise.keep([tensor])
    assert promise.wait()
    assert promise.is_success()
    assert promise.exception() is None
    assert torch.equal(chained.wait(), tensor + 1)


def test_a_promise_that_is_broken():
    promise = Promise(None)
    cause = LinkError("rank 1 is gone", hint="restart it")
    chained = promise.get_future().then(lambda future: future.value()).then(lambda f: f.value())
    promise.break_(cause)
    with pytest.raises(dist.DistBackendError, match="rank 1 is gone") as raised:
        promise.wait()
    assert raised.value.__cause__ is cause
    assert promise.is_completed()
    assert not promise.is_success()
    assert promise.exception() is cause
    with pytest.raises(LinkError, match="rank 1 is gone"):
        chained.wait()


def test_an_error_is_no_tensor_to_cpp():
    """What DDP's reducer does to a value: it must find an error there, or it crashes."""
    promise = Promise(None)
    promise.break_(LinkError("rank 1 is gone"))
    work = torch._C._distributed_c10d._create_work_from_future(promise.get_future())
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        work.result()


@pytest.mark.parametrize("first", ["kept", "chained"])
def test_callbacks_know_their_operation(first):
    """On whichever thread they run: at once if the result was there, else where it is set."""
    sequel = Sequel("group", Key(3, 4))
    promise = Promise(None, sequel)
    seen = []

    def look(future):
        seen.append((current_sequel(), sequel.number()))
        return future.value()

    if first == "kept":
        promise.keep([])
    future = promise.get_future().then(look).then(look)
    promise.get_future().add_done_callback(look)
    if first == "chained":
        setter = threading.Thread(target=promise.keep, args=([],))
        setter.start()
        setter.join()
    future.wait()
    assert [number for _, number in seen] == [0, 1, 2]
    assert {found for found, _ in seen} == {sequel}
    assert current_sequel() is None


@pytest.fixture
def pair():
    """A group of two ranks, of which each is a thread's."""
    url, timeout_s = f"local:///work-{os.getpid()}", 60.0
    with ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(Session, url, rank, 2, timeout_s) for rank in range(2)]
        sessions = [session.result() for session in coming]
        timeout = timedelta(seconds=timeout_s)
        yield [ManyhandsGroup(session, "both", [0, 1], timeout) for session in sessions]
        list(pool.map(Session.close, sessions))


def test_a_wait_that_has_an_end_says_what_it_was_for(pair):
    operations = [
        (lambda group: group.barrier(), "`barrier`, which waits for rank 1,"),
        (
            lambda group: group.allreduce_coalesced([torch.ones(3), torch.ones(4)]),
            r"`all_reduce float32\[3\] sum`, which waits for rank 1,",
        ),
    ]
    for start, about in operations:
        work = start(pair[0])
        with pytest.raises(
            dist.DistBackendError, match=rf"^{about} was not finished within 0\.01 s"
        ):
            work.wait(timedelta(milliseconds=10))
        other = start(pair[1])
        assert work.wait()
        assert other.wait()


def test_so_does_one_for_whoever_sends_first(pair):
    work = pair[0].recv_anysource([torch.zeros(3)])
    with pytest.raises(dist.DistBackendError, match=r"^`recv` from any rank was not finished"):
        work.wait(timedelta(milliseconds=10))
    sent = pair[1].send([torch.ones(3)], 0)
    assert work.wait()
    assert sent.wait()
