"""A process that has loaded torch, and becomes a worker as often as it is asked.

Loading torch takes longer than most checks. This process does it once, starts no thread, and forks
for each line on its stdin: {"rank": 0, "socket": path, "log": path, "env": {...}}. It answers
{"pid": ...}, and says {"pid": ..., "status": ...} when that child has ended. The child leaves the
loop and ends as any interpreter does, so that what happens at exit is tested too.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import selectors
import signal
import sys
import threading
import traceback
import warnings
from importlib import import_module
from multiprocessing.connection import Client

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

PRELOAD = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
)


TORCHS = "AsyncCheckpointExecutor"  # a pool of torch's that it ends without waiting for
PATIENCE_S = 10.0


def serve() -> dict | None:
    """Fork as told; returns in a child, with its orders, and at the end of stdin, with None."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(read_end, selectors.EVENT_READ)
    rest = b""
    while True:
        for key, _ in selector.select():
            if key.fd == read_end:
                os.read(read_end, 4096)
                reap()
                continue
            came = os.read(key.fd, 1 << 16)
            if not came:
                return None
            *lines, rest = (rest + came).split(b"\n")
            for line in lines:
                orders = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    os.close(read_end)
                    os.close(write_end)
                    return orders
                say(pid=pid)


def reap() -> None:
    """Report the children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        say(pid=pid, status=os.waitstatus_to_exitcode(status))


def say(**facts) -> None:
    print(json.dumps(facts), flush=True)


def work(orders: dict) -> None:
    """Run what the crew asks for until it hangs up."""
    log = os.open(orders["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(orders["env"], CREW_RANK=str(orders["rank"]))
    warnings.simplefilter("error")  # as in the tests themselves
    warnings.filterwarnings("ignore", message="ComplexHalf support")  # torch's word of complex32
    with Client(orders["socket"]) as line:
        line.send_bytes(pickle.dumps(orders["rank"]))
        while True:
            try:
                module, function, args, kwargs = pickle.loads(line.recv_bytes())
            except EOFError:
                break
            try:
                near = "" if "." in module else "tests.collectives.backend.programs."
                program = import_module(near + module)
                answer = True, getattr(program, function)(*args, **kwargs)
            except Exception:  # noqa: BLE001  (the crew shows it)
                answer = False, traceback.format_exc()
            line.send_bytes(pickle.dumps(answer))
    others = [thread for thread in threading.enumerate() if not alone(thread)]
    for thread in others:
        # What torch starts by itself is told to end, and not waited for. Ours has ended by now.
        if thread.name.startswith(TORCHS):
            thread.join(PATIENCE_S)
    left = [thread.name for thread in others if thread.is_alive()]
    if left:
        print(f"threads left: {left}", file=sys.stderr)
        sys.exit(3)


def alone(thread: threading.Thread) -> bool:
    # torch shows its tracing with tqdm, if that is installed, whose thread stays.
    return thread is threading.main_thread() or thread.name == "tqdm_monitor"


if __name__ == "__main__":
    for module in PRELOAD:
        import_module(module)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is loaded stays: a child need not look through it, not even at its end
    say(ready=True)
    given = serve()
    if given is not None:
        work(given)
