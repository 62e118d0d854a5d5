"""What the others see when a rank dies, stops, leaves or does something else.

Every check returns what was raised, operation by operation, for the test to judge.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import manyhands
from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend import team
from manyhands.collectives.backend.exchange import RESULT
from manyhands.collectives.backend.seats import take_seat
from manyhands.collectives.backend.work import Promise
from manyhands.collectives.courier import Courier
from tests.collectives.backend.programs.training import batch_of, loss_of, make_wide_model
from tests.collectives.backend.programs.values import SPLIT, reduce_scatter_single

HUGE = 25_000_000  # floats: 100 MB


def wait_among(victim: int) -> dict[str, str]:
    """Start one operation of each kind that needs `victim`, and collect their errors."""
    peer = next(r for r in range(dist.get_world_size()) if r not in (victim, dist.get_rank()))
    huge = torch.ones(HUGE)
    received = torch.zeros(300_000)
    works = {
        "all_reduce": dist.all_reduce(torch.ones(10), async_op=True),
        "broadcast": dist.broadcast(torch.ones(100_000), victim, async_op=True),
        "all_gather": dist.all_gather([torch.empty(9)] * 3, torch.ones(9), async_op=True),
        "reduce_scatter": reduce_scatter_single(
            torch.empty(100_000), torch.ones(300_000), async_op=True
        ),
        "send": dist.irecv(received, victim, tag=9),
        "recv": dist.irecv(torch.empty(5), tag=77),
        "huge": dist.all_reduce(huge, async_op=True),
        "barrier": dist.barrier(async_op=True),
    }
    store = dist.distributed_c10d._get_default_store()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(lambda: error_of(lambda: store.get("never set")))
        dist.isend(torch.ones(1), victim, tag=1).wait()  # everything has been started
        errors = {name: error_of(work.wait) for name, work in works.items()}
        errors["store"] = got.result()
    # The memory is its owner's again: nobody writes into it any more.
    huge.fill_(3.0)
    received.fill_(3.0)
    start_s = time.monotonic()
    errors["later"] = error_of(lambda: dist.all_reduce(torch.ones(3)))
    errors["later send"] = error_of(lambda: dist.send(torch.ones(3), peer))
    errors["later store"] = error_of(lambda: store.get("x"))
    errors["later any"] = error_of(lambda: dist.recv(torch.ones(3)))
    assert time.monotonic() - start_s < 20.0, "a group that has failed must say so at once"
    time.sleep(0.3)  # for writes that must not come
    assert (huge == 3.0).all()
    assert (received == 3.0).all()
    return errors


def die_among() -> None:
    """When the others have started everything, take part in the large one and die during it."""
    rank = dist.get_rank()
    for other in range(dist.get_world_size()):
        if other != rank:
            dist.recv(torch.empty(1), other, tag=1)
    dist.all_reduce(torch.ones(10))
    dist.broadcast(torch.ones(100_000), rank)
    dist.all_gather([torch.empty(9)] * 3, torch.ones(9))
    reduce_scatter_single(torch.empty(100_000), torch.ones(300_000))
    die_sending(f"all_reduce float32[{HUGE}]")
    dist.all_reduce(torch.ones(HUGE))
    signal.pause()


def die_sending(form: str, num_pieces: int = 3) -> None:
    """When so many pieces of such an operation have left this process."""
    carry, left = Courier._carry, itertools.count(1)

    def carry_and_die(courier, letter, buffers) -> None:
        carry(courier, letter, buffers)
        word = words.decode(letter.message)
        counts = isinstance(word, words.Piece) and word.form.startswith(form)
        if counts and next(left) == num_pieces:
            os.kill(os.getpid(), signal.SIGKILL)

    Courier._carry = carry_and_die


def error_of(call) -> str:
    """What `call()` raises: its type and message; empty if it ends well."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (the test judges it)
        return f"{type(error).__name__}: {error}"
    return ""


class Spare(nn.Sequential):
    """The wide model, beside a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__(*make_wide_model())
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            inputs = layer(inputs)
        return inputs


def compress(wrapped: DistributedDataParallel) -> None:
    wrapped.register_comm_hook(None, manyhands.compressed("bf16"))


def approximate(wrapped: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


MODES = {  # how DDP averages: (the model, options, what is done to it)
    "as_bucket_view": (make_wide_model, {"gradient_as_bucket_view": True}, None),
    "compressed": (make_wide_model, {}, compress),
    "find_unused": (Spare, {"find_unused_parameters": True}, None),
    "power_sgd": (make_wide_model, {}, approximate),
    "static_graph": (Spare, {"static_graph": True}, None),
}
PLAIN = (make_wide_model, {}, None)


def train_until_error(
    victim: int,
    at_step: int,
    late_s: float = 0.0,
    *,
    agreed: bool = True,
    mode: str | None = None,
) -> dict[str, object]:
    """DDP, plain or in that mode; `victim` dies between the buckets of one backward pass.

    The sums it made in the step before leave `late_s` later. `agreed`: it does not die before the
    others have ended that step.
    """
    rank = dist.get_rank()
    make, options, prepare = PLAIN if mode is None else MODES[mode]
    model = make()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.06, **options)
    if prepare is not None:
        prepare(wrapped)
    for step in range(100):
        inputs, labels = batch_of(rank, step)
        if rank == victim and step == at_step - 1 and late_s:
            send_sums_late(late_s)
        if step == at_step and agreed:
            agree_with(victim)
        if rank == victim and step == at_step:
            model[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        start_s = time.monotonic()
        try:
            loss_of(wrapped(inputs), labels).backward()
        except RuntimeError as error:
            took_s = time.monotonic() - start_s
            return {"step": step, "error": str(error), "took_s": took_s}
    raise AssertionError("no step failed")


def send_sums_late(seconds: float) -> None:
    """From here on, as a machine does whose sending thread is not given its turn."""
    carry = Courier._carry

    def carry_late(courier, letter, buffers) -> None:
        word = words.decode(letter.message)
        if isinstance(word, words.Piece) and word.step == RESULT:
            copies = [bytes(buffer) for buffer in buffers]
            threading.Timer(seconds, carry, (courier, letter, copies)).start()
        else:
            carry(courier, letter, buffers)

    Courier._carry = carry_late


def agree_with(victim: int) -> None:
    """It learns that the others are here."""
    rank = dist.get_rank()
    if rank != victim:
        dist.send(torch.ones(1), victim)
        return
    for other in range(dist.get_world_size()):
        if other != rank:
            dist.recv(torch.empty(1), other)


def die_within(
    victim: int, program: str, given: Mapping[str, object], form: str, num_pieces: int
) -> dict[str, object]:
    """Run that program with what is given, until `victim` dies sending such an operation."""
    module, function = program.split(".")
    run = getattr(import_module(f"tests.collectives.backend.programs.{module}"), function)
    if dist.get_rank() == victim:
        die_sending(form, num_pieces)
    start_s = time.monotonic()
    error = error_of(lambda: run(**given))
    return {"error": error, "took_s": time.monotonic() - start_s}


def train_with_a_hook_until_error(victim: int) -> dict[str, object]:
    """The same with a hook in Python that chains to the future."""

    def hook(group, bucket):
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return (
            work.get_future().then(lambda future: future.value()[0]).then(lambda f: f.value() / 2)
        )

    rank = dist.get_rank()
    wrapped = DistributedDataParallel(make_wide_model(), bucket_cap_mb=0.06)
    wrapped.register_comm_hook(dist.group.WORLD, hook)
    for step in range(100):
        inputs, labels = batch_of(rank, step)
        if rank == victim and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss_of(wrapped(inputs), labels).backward()
        except RuntimeError as error:
            return {"step": step, "error": str(error), "took_s": 0.0}
    raise AssertionError("no step failed")


def all_reduce_until_error() -> dict[str, object]:
    """Returns how long the one that failed took, and when that was."""
    tensor = torch.ones(SPLIT)
    while True:
        start_s = time.monotonic()
        error = error_of(lambda: dist.all_reduce(tensor))
        if error:
            now_s = time.monotonic()
            return {"error": error, "took_s": now_s - start_s, "at_s": now_s}
        tensor.fill_(1.0)


def differ(what: str) -> str:
    """Ranks that do not do the same; returns what was raised here."""
    rank = dist.get_rank()
    if what == "operations":
        return error_of(
            (lambda: dist.all_reduce(torch.ones(5)))
            if rank == 0
            else (lambda: dist.broadcast(torch.ones(5), 0))
        )
    if what == "sizes":
        return error_of(lambda: dist.all_reduce(torch.ones(5 + rank)))
    if what == "large sizes":
        return error_of(lambda: dist.all_reduce(torch.ones(500_000 + rank)))
    if what == "dtypes":
        dtype = torch.float32 if rank == 0 else torch.int32
        return error_of(lambda: dist.all_reduce(torch.ones(5, dtype=dtype)))
    if what == "splits":
        # One row for the other and one for itself; the last rank wants two from everybody.
        wanted = [1] * dist.get_world_size() if rank == 0 else [2, 1]
        return error_of(
            lambda: (
                dist.all_to_all_single(torch.empty(sum(wanted)), torch.ones(2), wanted, [1, 1]),
                dist.barrier(),
            )
        )
    if what in ("roots", "large roots"):
        size = 5 if what == "roots" else 100_000
        # Each gives to the other and takes from nobody: only what comes too much shows it.
        return error_of(lambda: (dist.broadcast(torch.ones(size), rank), dist.barrier()))
    if what == "pair sizes":
        if rank == 0:
            return error_of(lambda: (dist.send(torch.ones(5), 1), dist.barrier()))
        return error_of(lambda: dist.recv(torch.ones(6), 0))
    raise AssertionError(what)


def mistake_of_one() -> None:
    """A call that is refused here takes no number: the right one that follows meets the others'."""
    num = dist.get_world_size()
    if dist.get_rank() == 0:
        wrong, out = torch.ones(num, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        for call in (
            lambda: dist.all_reduce(wrong, dist.ReduceOp.AVG),
            lambda: dist.reduce(wrong, 0, dist.ReduceOp.AVG),
            lambda: reduce_scatter_single(out, wrong, dist.ReduceOp.AVG),
            lambda: dist.reduce_scatter(out, list(wrong.split(1)), dist.ReduceOp.AVG),
        ):
            assert "is not defined" in error_of(call)
        for call in (
            lambda: dist.send(out, num + 4),
            lambda: dist.recv(out, num + 4),
            lambda: dist.broadcast(out, num + 4),
        ):
            assert error_of(call), "a rank that there is not"
    right = torch.ones(3)
    dist.all_reduce(right)
    assert (right == num).all()


def late(seconds: float) -> str:
    """Rank 1 does not call what rank 0 waits for; the group's timeout is short."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    if dist.get_rank() == 0:
        return error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
    return error_of(lambda: dist.recv(torch.ones(3), 0))


class Told(logging.Handler):
    """What a logger is given, for whoever waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put(record.getMessage())


def stall(seconds: float) -> list[str]:
    """Rank 1 is late twice, for longer than a rank waits without a word; what rank 0 is told."""
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(4), 1)
        return []
    team._STALL_S, team._TICK_S = seconds, 0.1
    team.log.addHandler(told := Told())
    works = [dist.all_reduce(torch.ones(3), async_op=True)]
    texts = [told.texts.get(timeout=30)]
    # When this one has waited for so long, the first one has been looked at again.
    works.append(dist.broadcast(torch.empty(4), 1, async_op=True))
    texts.append(told.texts.get(timeout=30))
    dist.send(torch.ones(1), 1)
    for work in works:
        work.wait()
    assert told.texts.empty(), told.texts.get()
    return texts


def wait_for_nobody() -> None:
    """Until it is interrupted, in an operation that nobody else calls."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
    main = threading.get_ident()

    def tell() -> None:
        while not is_waiting(main, Promise.wait):
            time.sleep(0.01)  # nobody is told when a thread begins to wait
        dist.send(torch.ones(1), 1)

    threading.Thread(target=tell, daemon=True).start()
    dist.all_reduce(torch.ones(3))


def is_waiting(thread: int, *functions) -> bool:
    """Whether it is in all of these functions."""
    frame, codes = sys._current_frames()[thread], set()
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    return all(function.__code__ in codes for function in functions)


def hear_that_it_waits(sender: int) -> None:
    dist.recv(torch.empty(1), sender)


def enter_a_group_of_two(url: str) -> None:
    """The other one does not come, and this one is interrupted as it waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()

    def interrupt() -> None:
        while not is_waiting(main, take_seat, threading.Condition.wait):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    dist.init_process_group("manyhands", init_method=url, rank=0, world_size=2)


def leave_early() -> None:
    """Raise, as a program with a mistake would: nothing here catches it."""
    dist.destroy_process_group()


def give_and_leave() -> None:
    """Everything this rank owes has left with it: the others do without it."""
    rank, num = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((200_000,), float(rank))
    rest = dist.new_group(list(range(1, num)))
    if rank == 0:
        for other in range(1, num):
            dist.send(tensor, other)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 1)
        dist.destroy_process_group()
        return
    store = dist.distributed_c10d._get_default_store()
    text = error_of(lambda: store.wait(["gone"], timedelta(seconds=30)))
    assert "rank 0" in text, text  # it has left, and the store with it
    came = torch.empty(200_000)
    dist.recv(came, 0)
    assert (came == 0).all()
    dist.broadcast(tensor, 0)
    assert (tensor == 0).all()
    tensor.fill_(rank)
    dist.reduce(tensor, 1)
    if rank == 1:
        assert (tensor == sum(range(num))).all()
    if num > 2:
        tensor.fill_(1.0)
        dist.all_reduce(tensor, group=rest)
        assert (tensor == num - 1).all()


def sum_without_one_that_left() -> None:
    """Whoever fails first ends the group for all: after `give_and_leave` is over everywhere."""
    text = error_of(lambda: dist.all_reduce(torch.ones(3)))
    assert "rank 0" in text, text
    assert "left" in text, text


def answer_to_one_that_left() -> None:
    """A rank waits for a key, gives up and leaves; the key comes later. Nobody else is harmed."""
    rank, num = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    others = dist.new_group(list(range(num - 1)))
    if rank == num - 1:
        text = error_of(lambda: store.wait(["late"], timedelta(milliseconds=50)))
        assert text.startswith("StoreTimeout"), text
        dist.send(torch.ones(1), 0)
        dist.destroy_process_group()
        return
    if rank == 0:
        dist.recv(torch.ones(1), num - 1)
        store.set("late", "now")
    for _ in range(20):
        tensor = torch.ones(SPLIT)
        dist.all_reduce(tensor, group=others)
        assert (tensor == num - 1).all()
