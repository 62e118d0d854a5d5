"""Hands: one thread for each device, in one process, over the averaging engine.

The threads meet as ranks of a group on the local link, with the same promises as machines have:
sums are added up in one order, and every rank gets the same bits.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from manyhands.collectives.backend.open import open_group
from manyhands.compat.fluxdistributed.errors import Bystander
from manyhands.core.errors import LinkError
from manyhands.stages.carrier import AloneCarrier, Carrier, GroupCarrier

T = TypeVar("T")
Act = Callable[[int, Carrier], T]

MEET_S = 60.0  # for the threads to find each other
PATIENCE_S = 3600.0  # for the slowest device: a step, an evaluation, a checkpoint


def run_hands(
    devices: Sequence[torch.device], act: Act[T], *, timeout_s: float = PATIENCE_S
) -> list[T]:
    """Run `act(rank, carrier)` once for each device, each in a thread of its own; what they return.

    Blocks until all have ended. If one raises, the others are told so and end; what it raised is
    raised here. A Ctrl-C ends them likewise. A single device is served by the caller's thread:
    there is nobody else from whom another one could hear of a Ctrl-C.
    """
    if len(devices) == 1:
        with using(devices[0]), torch.enable_grad():  # as a new thread has it
            return [act(0, AloneCarrier())]
    hands = _Hands(devices, act, timeout_s)
    threads = [
        threading.Thread(
            target=hands.run, args=(rank,), name=f"device {rank} ({device})", daemon=True
        )
        for rank, device in enumerate(devices)
    ]
    with _divided(len(devices)):
        for thread in threads:
            thread.start()
        try:
            # Not by join: one that a Ctrl-C ends takes its thread for over, up to Python 3.12. A
            # process that goes while it computes is aborted by torch.
            hands.ended.wait()
        except BaseException:  # Ctrl-C, most likely
            hands.stop()
            hands.ended.wait()
            raise
        finally:
            for thread in threads:
                thread.join()
    return hands.results()


def using(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, it is the one that this thread's work goes to where no device is named."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _divided(num_devices: int) -> Generator[None]:
    """Threads that are started inside have so many cores each that all have some.

    torch keeps the number for each thread, and one for threads to come; MKL has one for all. Sums
    of a matrix product depend on it, so it must not change while devices compute.
    """
    number = torch.get_num_threads()
    torch.set_num_threads(cores_for(num_devices, number))
    try:
        yield
    finally:
        torch.set_num_threads(number)


def cores_for(num_devices: int, num_cores: int) -> int:
    """How many cores torch uses for each of so many devices."""
    return max(1, num_cores // num_devices)


class _Hands(Generic[T]):
    """Of several devices."""

    def __init__(self, devices: Sequence[torch.device], act: Act[T], timeout_s: float) -> None:
        self._devices, self._act, self._timeout_s = devices, act, timeout_s
        self._where = f"local:///devices-{secrets.token_hex(8)}"
        self._num_cores = cores_for(len(devices), torch.get_num_threads())
        self._lock = threading.Lock()
        self._made: dict[int, T] = {}
        self._errors: list[BaseException] = []  # the first one is the cause of the others
        self._carriers: list[Carrier] = []
        self._stopped = False
        self._num_left = len(devices)
        self.ended = threading.Event()
        """All threads have come to their end."""

    def run(self, rank: int) -> None:
        try:
            with using(self._devices[rank]):
                made = self._joined(rank)
        except BaseException as error:  # noqa: BLE001  (it is raised by `results`: SystemExit too)
            with self._lock:
                self._errors.append(error)
        else:
            with self._lock:
                self._made[rank] = made
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self.ended.set()

    def _joined(self, rank: int) -> T:
        world = len(self._devices)
        group = open_group(
            self._where, rank=rank, world=world, timeout_s=self._timeout_s, meet_s=MEET_S
        )
        try:
            carrier = GroupCarrier(group, self._devices[rank])
            # A group starts threads, and sets their number of cores: nobody computes before all
            # groups are open.
            carrier.sum(torch.zeros(1), range(world)).wait()
            # This thread may have asked for its number first while a group had set it to one.
            torch.set_num_threads(self._num_cores)
            return self._acted(rank, carrier)
        finally:
            group.shutdown()

    def _acted(self, rank: int, carrier: Carrier) -> T:
        with self._lock:
            self._carriers.append(carrier)
            stopped = self._stopped
        try:
            if stopped:
                raise LinkError("the training was stopped")
            return self._act(rank, carrier)
        except BaseException as error:
            with self._lock:
                self._errors.append(error)  # before the others can hear of it
            carrier.give_up(f"{type(error).__name__}: {error}"[:500])
            raise

    def stop(self) -> None:
        """Nothing works from here on; a thread learns so when it next needs another one."""
        with self._lock:
            self._stopped = True
            carriers = list(self._carriers)
        for carrier in carriers:
            carrier.give_up("the training was stopped")

    def results(self) -> list[T]:
        # What a device did itself says more than that another one has gone.
        own = (e for e in self._errors if not isinstance(e, Bystander | LinkError))
        error = next(own, self._errors[0] if self._errors else None)
        if error is not None:
            raise error
        return [self._made[rank] for rank in range(len(self._devices))]
