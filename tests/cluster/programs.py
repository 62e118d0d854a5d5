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

HOLDS = python(
    "import fcntl, os, sys, time\n"
    "job, rank = os.environ['MANYHANDS_JOB'], os.environ['RANK']\n"
    "attempt = os.environ['MANYHANDS_RESTART_COUNT']\n"
    "def note(name, text):\n"
    "    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)\n"
    "    os.write(fd, f'{text}\\n'.encode())\n"
    "    os.close(fd)\n"
    "lock = open(f'lock-{job}-{rank}', 'w')\n"
    "try:\n"
    "    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except BlockingIOError:\n"
    "    note('overlaps', f'{job}-{rank}: attempt {attempt}')\n"
    "note(f'starts-{job}-{rank}', attempt)\n"
    "note(f'pid-{job}-{attempt}-{rank}.new', os.getpid())\n"
    "os.rename(f'pid-{job}-{attempt}-{rank}.new', f'pid-{job}-{attempt}-{rank}')\n"
    "end_s = time.monotonic() + float(sys.argv[1])\n"
    "while time.monotonic() < end_s and not os.path.exists('go'): time.sleep(0.02)\n"
    "note(f'ends-{job}-{rank}', attempt)\n"
)
"""For so many seconds, or until there is a file `go`, holds a lock for its rank of its job. In its
folder it notes who found the lock held (`overlaps`), which attempts began (`starts-JOB-RANK`) and
by which processes (`pid-JOB-ATTEMPT-RANK`), and which came to their end (`ends-JOB-RANK`).
"""
