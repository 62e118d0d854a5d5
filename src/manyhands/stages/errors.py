"""What can go wrong in a step, beside a plan or a variable that is wrong from the start."""

from __future__ import annotations

from manyhands.core.errors import ManyhandsError


class StepFailed(ManyhandsError):
    """A peer's layers, loss or inputs raised an error. No peer has applied the step.

    `peer` is its name, `traceback` what it saw, as text. The others are alive: the next step can be
    tried.
    """

    def __init__(self, peer: str, message: str, traceback: str, *, hint: str | None = None) -> None:
        super().__init__(f"peer {peer}: {message}", hint=hint)
        self.peer = peer
        self.traceback = traceback


class PlanBroken(ManyhandsError):
    """A peer is gone, or the link to the others: this plan cannot go on."""
