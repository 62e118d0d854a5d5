"""Start: a main process, its workers on this machine, and the end of all of them.

The workers run the very program that has called `start`: there they get to the same call, and
instead of starting workers they are one. So nothing is sent that would have to be evaluated.
"""

from __future__ import annotations

import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.compat.fluxdistributed.errors import WorkersFailed
from manyhands.compat.fluxdistributed.hands import cores_for
from manyhands.compat.fluxdistributed.optimizers import Opt
from manyhands.compat.fluxdistributed.processes import (
    OUTAGE_S,
    Synced,
    check_call,
    connect,
    getgrads,
    model_of,
    syncgrads,
)
from manyhands.compat.fluxdistributed.setup import Device, resolve
from manyhands.compat.fluxdistributed.step import LossFn
from manyhands.compat.fluxdistributed.training import Result
from manyhands.core.errors import LinkError, UsageError
from manyhands.links.hub import Hub

WORKERS = 4
GRACE_S = 30.0  # for workers to end by themselves once one has failed
_RANK, _NUMBER, _URL, _LINE = (
    f"MANYHANDS_FLUX_{name}" for name in ("WORKER", "WORKERS", "URL", "LINE")
)

# Taken by the call that trains. A program is a process's, and so is this: workers run it from its
# beginning and get to the first such call, whichever one they were started by.
_CALLED = threading.Lock()


def start(
    loss: LossFn,
    model: nn.Module,
    key: Any,  # noqa: ANN401
    opt: Opt,
    batchsize: int = 48,
    *,
    workers: int = WORKERS,
    devices: Sequence[Device] | None = None,
    verbose: bool = False,
    **options: Any,  # noqa: ANN401
) -> Result:
    """Train with worker processes on this machine; `options` are those of `getgrads`.

    It starts `workers` copies of this program, which get to this call too and do not return from
    it; put what only the main process shall do after it. `devices[n]` is worker n's (repeated from
    the front if there are fewer); without it a GPU each, else the CPU. Once in a program: a second
    call is a UsageError, since its workers would get to the first one.

    Blocks until all workers have ended. Raises WorkersFailed, which names those that failed or were
    killed; the others then end, too. If the main process is killed, so do the workers.
    """
    # What is refused here is refused in the workers, too: all go on to the same call.
    if workers < 1:
        raise UsageError(f"{workers} workers", hint="at least one")
    resolve(devices)
    check_call(loss, model, key, opt, batchsize, device=None, **options)
    is_worker = _RANK in os.environ
    command = [] if is_worker else _own_command()
    if not _CALLED.acquire(blocking=False):
        raise UsageError(
            "a second start() in one program: its workers would train what the first one says",
            hint="a program for each training; to try again, run it again, with resume=True",
        )
    if is_worker:
        _work(loss, model, key, opt, batchsize, devices, options)
    run = f"flux-{secrets.token_hex(8)}"
    with Hub("127.0.0.1:0", insecure=False) as hub:
        where = f"{hub.address.code()}?run={run}"
        crew = _Crew(command, workers, where)
        synced = crew.run(lambda met: _sync(where, workers, verbose, met), hub.close)
    return Result(
        models=[(torch.device("cpu"), model_of(model, synced))],
        steps=synced.steps,
        skipped=synced.skipped,
        history=synced.history,
    )


def _meet(where: str, rank: int, workers: int) -> ManyhandsGroup:
    """At this machine's own hub, which never comes back: nobody waits as long as for another's."""
    return connect(where, rank=rank, workers=workers, outage_s=OUTAGE_S)


def _sync(where: str, workers: int, verbose: bool, met: Callable[[], None]) -> Synced:
    group = _meet(where, 0, workers)
    met()
    try:
        return syncgrads(group, verbose=verbose)
    finally:
        group.shutdown()


def _work(
    loss: LossFn,
    model: nn.Module,
    key: Any,  # noqa: ANN401
    opt: Opt,
    batchsize: int,
    devices: Sequence[Device] | None,
    options: dict[str, Any],
) -> NoReturn:
    rank, workers = int(os.environ.pop(_RANK)), int(os.environ.pop(_NUMBER))
    where = os.environ.pop(_URL)
    _watch(int(os.environ.pop(_LINE)))
    torch.set_num_threads(cores_for(workers, torch.get_num_threads()))
    device = None if devices is None else devices[(rank - 1) % len(devices)]
    group = _meet(where, rank, workers)
    try:
        getgrads(loss, model, key, opt, batchsize, group=group, device=device, **options)
    except LinkError as error:
        sys.stderr.write(f"worker {rank} ends: {error}\n")
        raise SystemExit(1) from None
    except BaseException as error:
        group.give_up(f"{type(error).__name__}: {error}"[:500])
        raise
    finally:
        group.shutdown()
    raise SystemExit(0)


def _watch(line: int) -> None:
    """End with the main process, whose end of this pipe goes with it, whatever else is going on."""

    def wait() -> None:
        with suppress(OSError):
            os.read(line, 1)
        os.write(2, b"the main process is gone: this worker ends\n")
        os._exit(1)

    threading.Thread(target=wait, name="watch the main process", daemon=True).start()


def _own_command() -> list[str]:
    """What this program was started with."""
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is None and "-c" not in sys.orig_argv:
        raise UsageError(
            "start() runs this program again in each worker, but there is no program here",
            hint="put it in a file; in a notebook use train(), with one thread a device",
        )
    return [sys.executable, *sys.orig_argv[1:]]


class _End(NamedTuple):
    """How a worker ended, as `subprocess` says it; the main process's own part is worker 0."""

    worker: int
    code: int


@dataclass
class _Crew:
    """The workers' processes. One use."""

    command: list[str]
    num_workers: int
    where: str
    _children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict[int, Any])
    _ends: queue.SimpleQueue[_End] = field(default_factory=queue.SimpleQueue[_End])
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _met: threading.Event = field(default_factory=threading.Event)

    def run(
        self, sync: Callable[[Callable[[], None]], Synced], hang_up: Callable[[], None]
    ) -> Synced:
        """Start them, `sync` with them in a thread, and wait for all. Raises WorkersFailed.

        `sync` calls what it is given when all workers are there; `hang_up` ends it if they will not
        come.
        """
        made: list[Synced] = []
        errors: list[Exception] = []

        def own() -> None:
            try:
                made.append(sync(self._met.set))
            except Exception as error:  # noqa: BLE001  (it is raised below)
                errors.append(error)
            self._ends.put(_End(0, 1 if errors else 0))

        line, held = os.pipe()
        ends: list[_End] = []
        try:
            try:
                for worker in range(1, self.num_workers + 1):
                    self._start(worker, line)
            finally:
                os.close(line)
            self._thread(own, "syncgrads")
            ends = self._wait()
        finally:
            made_to_end = self._end_all()
            os.close(held)
            hang_up()
            for thread in self._threads:
                thread.join()
        failed = [end for end in ends if end.worker and self._is_failure(end)]
        if failed or errors:
            said = [f"worker {end.worker} {self._said(end)}" for end in failed]
            said += [f"worker {worker} was made to end" for worker in made_to_end]
            why = errors[0] if errors else None
            raise WorkersFailed(
                ", ".join(said) + (f": {why}" if why is not None and self._met.is_set() else ""),
                hint="what a worker said is on stderr; resume=True goes on from a checkpoint",
            ) from why
        return made[0]

    def _start(self, worker: int, line: int) -> None:
        environment = {
            **os.environ,
            _RANK: str(worker),
            _NUMBER: str(self.num_workers),
            _URL: self.where,
            _LINE: str(line),
        }
        child = subprocess.Popen(self.command, env=environment, pass_fds=(line,))  # noqa: S603
        self._children[worker] = child

        def wait() -> None:
            self._ends.put(_End(worker, child.wait()))

        self._thread(wait, f"wait for worker {worker}")

    def _wait(self) -> list[_End]:
        """How those ended that have, first to last: all, or after a failure those that did by
        themselves. If it was before all had met, the others would wait in vain.
        """
        left, ends, failed = set(range(self.num_workers + 1)), list[_End](), False
        while left:
            grace_s = GRACE_S if self._met.is_set() else 0.0
            try:
                end = self._ends.get(timeout=grace_s if failed else None)
            except queue.Empty:
                break
            left.discard(end.worker)
            ends.append(end)
            failed = failed or self._is_failure(end)
        return ends

    def _is_failure(self, end: _End) -> bool:
        """If one ends before all have met, they never will: no end is a good one then."""
        return end.code != 0 or not self._met.is_set()

    def _said(self, end: _End) -> str:
        if end.code < 0:
            return f"was killed by signal {-end.code}"
        if not end.code and not self._met.is_set():
            return "ended before it had met the others: does it get to start()?"
        return f"ended with code {end.code}"

    def _end_all(self) -> list[int]:
        """The workers that had to be told."""
        told = [worker for worker, child in self._children.items() if child.poll() is None]
        for worker in told:
            self._children[worker].terminate()
        for worker in told:
            try:
                self._children[worker].wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._children[worker].kill()
                self._children[worker].wait()
        return told

    def _thread(self, act: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=act, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
