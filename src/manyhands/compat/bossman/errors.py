"""What can go wrong between a boss and its workers, by name."""

from __future__ import annotations

from manyhands.core.errors import ManyhandsError


class NoWorkers(ManyhandsError, TimeoutError):
    """Fewer workers came than were asked for; `came` are the names of those who did."""

    def __init__(self, came: tuple[str, ...], wanted: int, timeout_s: float, *, hint: str) -> None:
        some = f"{len(came)} of {wanted} workers came ({', '.join(came)})"
        none = f"no workers came, {wanted} {'was' if wanted == 1 else 'were'} expected,"
        super().__init__(f"{some if came else none} within {timeout_s:g} s", hint=hint)
        self.came, self.wanted, self.timeout_s = came, wanted, timeout_s


class WorkerFailed(ManyhandsError):
    """Something raised an error on a worker, which lives on; `traceback` is what it saw, as text.

    `ended`: it was in the middle of a step, and the plan is over: distribute the model again.
    """

    def __init__(
        self,
        worker: str,
        message: str,
        traceback: str = "",
        *,
        hint: str | None = None,
        ended: bool = False,
    ) -> None:
        super().__init__(f"worker {worker}: {message}", hint=hint)
        self.worker, self.traceback, self.ended = worker, traceback, ended
        if traceback:
            self.add_note(f"on worker {worker}:\n{traceback}")


class WorkerRefused(WorkerFailed):
    """The worker does not build what it was asked for; another one may."""
