"""Programs for ranks: small, and fast to start."""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-I", "-S", "-c")


def python(code: str) -> tuple[str, ...]:
    return (*PYTHON, code)


STAYS = python("import signal, os; print('up', os.getpid(), flush=True)\nwhile 1: signal.pause()")
SUCCEEDS = python("print('done')")
STUBBORN = python(
    "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', os.getpid(), flush=True)\nwhile 1: signal.pause()"
)
DEAF = python(
    "import signal, os; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    "print('up', os.getpid(), flush=True)\nwhile 1: signal.pause()"
)
"""As STUBBORN, but says that it was asked."""
POLITE = python(
    "import signal, sys, os\n"
    "def leave(*_): print('saved', flush=True); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "print('up', os.getpid(), flush=True)\nwhile 1: signal.pause()"
)
FAILS = python("import sys; print('about to'); sys.exit(7)")
RAISES = python("print('before', flush=True)\ndef f(): raise ValueError('the reason')\nf()")
PARENT = python(
    "import os, signal\n"
    "if not (child := os.fork()):\n"
    "    while 1: signal.pause()\n"
    "print('up', os.getpid(), child, flush=True)\n"
    "while 1: signal.pause()"
)
_DAEMON = (
    "import os, signal\n"
    "read, write = os.pipe()\n"
    "if not os.fork():\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    os.write(write, b'%d' % os.getpid())\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    os.execve('/bin/sleep', ['sleep', '100000'], {ENVIRONMENT})\n"
    "os.wait()\n"
    "print('up', os.getpid(), int(os.read(read, 20)), flush=True)\n"
)
LEAVES_DAEMON = python(_DAEMON.replace("{ENVIRONMENT}", "{}"))
"""A daemon in a session of its own, that ignores SIGTERM and has nothing in its environment."""
HAS_DAEMON = python(_DAEMON.replace("{ENVIRONMENT}", "{}") + "while 1: signal.pause()")
HAS_MARKED_DAEMON = python(
    _DAEMON.replace("{ENVIRONMENT}", "os.environ") + "while 1: signal.pause()"
)
