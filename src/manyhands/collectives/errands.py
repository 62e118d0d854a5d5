"""Errands: what waits for the meeting point, on a thread beside those that must not wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec

from manyhands.core.errors import ManyhandsError

log = logging.getLogger(__name__)
P = ParamSpec("P")


class Errands:
    """Runs one after the other, in the order given. `failed` is told what an errand raised."""

    def __init__(self, name: str, failed: Callable[[ManyhandsError], None]) -> None:
        self._failed = failed
        self._thread = ThreadPoolExecutor(1, name)

    def run(self, act: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do this when its turn comes; not after `close`."""
        self._thread.submit(act, *args, **kwargs).add_done_callback(self._done)

    def close(self) -> None:
        """Wait for those that were given."""
        self._thread.shutdown()

    def _done(self, errand: Future[None]) -> None:
        error = errand.exception()
        if isinstance(error, ManyhandsError):
            self._failed(error)
        elif error is not None:
            log.error("an errand failed", exc_info=error)
            self._failed(ManyhandsError(f"an errand failed: {error!r}"))
