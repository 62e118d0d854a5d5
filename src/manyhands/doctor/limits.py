"""Time limits: no check outlasts its own, and all of them together not the examination's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from manyhands.doctor.report import Finding, Outcome, problem, skipped

T = TypeVar("T")
log = logging.getLogger(__name__)

DNS_S = 3.0
TCP_S = 3.0
TLS_S = 3.0
IDENTIFY_S = 1.0  # to see what else is on a port
GREETING_S = 4.0
LOGIN_S = 4.0
RIGHTS_S = 6.0
TORCH_S = 10.0
LOOPBACK_S = 3.0
MEASURE_S = 8.0  # beyond the time that is spent on sending
MACHINE_S = 3.0
_SLACK_S = 0.5  # a check that keeps its own time may finish the sentence


class Budget:
    """What is left of an examination's time."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._deadline_s = time.monotonic() + total_s

    def call(self, check: str, limit_s: float, work: Callable[[float], Outcome[T]]) -> Outcome[T]:
        """Make a check within `limit_s`; `work` is told how long it has.

        A check that hangs, or breaks, is a finding like any other. It is left behind on a daemon
        thread then: whatever it waits for, the report goes on.
        """
        limit_s = min(limit_s, self._deadline_s - time.monotonic())
        if limit_s <= 0:
            return Outcome(findings=(skipped(check, f"the {self._total_s:g} s were used up"),))
        results: list[Outcome[T]] = []

        def body() -> None:
            try:
                results.append(work(limit_s))
            except Exception as error:  # a broken check must not hide the others
                log.debug("check %s failed", check, exc_info=True)
                results.append(Outcome(findings=(_broken(check, error),)))

        thread = threading.Thread(target=body, name=f"doctor {check}", daemon=True)
        thread.start()
        thread.join(limit_s + _SLACK_S)
        if results:
            return results[0]
        return Outcome(
            findings=(
                problem(
                    check,
                    f"no end within {limit_s:.1f} s",
                    "something on the way swallows packets or is overloaded; try again, and with "
                    "a larger --seconds on a slow line",
                    limit_s=round(limit_s, 1),
                ),
            )
        )


def _broken(check: str, error: Exception) -> Finding:
    return problem(
        check,
        f"the check itself failed: {type(error).__name__}: {error}",
        "this is a fault of manyhands: please report it with this line",
    )
