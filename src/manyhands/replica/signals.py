"""Signals: SIGTERM and the first Ctrl-C ask a peer to leave its run in good order."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class Signals:
    """Takes them until `close`, where that is possible: in the main thread.

    A second Ctrl-C is one as always.
    """

    def __init__(self) -> None:
        self.leave = False
        """Asked to leave."""
        self.interrupted = False
        """By Ctrl-C: the program shall end."""
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # What is ignored stays so, and what the user handles is the user's.
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            log.warning("leaving after this round; Ctrl-C again to stop at once")
        self.leave = True

    def close(self) -> None:
        """As it was before. Idempotent."""
        while self._before:
            signal.signal(*self._before.popitem())


def how_to_go_on() -> str:
    """What goes on from what was saved, once this program has been interrupted."""
    if again := os.environ.get("MANYHANDS_AGAIN"):  # as `manyhands run` says
        return again
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__"):
        return "wrap(..., resume=True)"  # a notebook: no command begins it again
    name = None if main.__spec__ is None else main.__spec__.name.removesuffix(".__main__")
    begin = sys.argv if name in (None, "__main__") else ["-m", name, *sys.argv[1:]]
    return f"MANYHANDS_RESUME=1 {shlex.join(['python', *begin])}"
