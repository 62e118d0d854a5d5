"""Workers as processes, forked from one that has loaded torch."""

import contextlib
import os
import sys

import torch

from manyhands.testing.broker import free_ports
from manyhands.worker import command, servant, workshop  # noqa: F401  (loaded here once for all)

PATIENCE_S = 60.0
# The first step of an optimizer loads half of torch.
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()


def run(arguments, environ, log):
    """In the process of a worker."""
    os.environ.update(environ)
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["manyhands worker", *arguments]
    torch.set_num_threads(1)
    command.main()


def free_port():
    """None that a worker which dials before there is a boss could be given for its own end."""
    return free_ports().amqp


class Hands:
    """Starts workers for one boss, and leaves none behind."""

    def __init__(self, context, folder):
        self._context, self._folder = context, folder
        self.port = free_port()
        self.workers = {}

    def __enter__(self):
        return self

    def __exit__(self, *details):
        for process in self.workers.values():
            process.kill()
            process.join(PATIENCE_S)
        for process in self.workers.values():
            process.close()

    def start(self, name, *arguments, label=None, **environ):
        point = {"MODEL_HOST": "127.0.0.1", "MODEL_PORT": str(self.port), **environ}
        words = ["--name", label or name, *arguments]
        process = self._context.Process(target=run, args=(words, point, self._folder / name))
        process.start()
        self.workers[name] = process
        return process

    def log(self, name):
        path = self._folder / name
        return path.read_text() if path.exists() else ""

    def code(self, name):
        """Once it has ended by itself."""
        self.workers[name].join(PATIENCE_S)
        assert self.workers[name].exitcode is not None, self.log(name)
        return self.workers[name].exitcode

    def finish(self):
        for name in self.workers:
            assert self.code(name) == 0, self.log(name)


@contextlib.contextmanager
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
