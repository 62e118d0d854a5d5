"""A real `manyhands up` under test: its process, its client, and whatever it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time

import psutil

from manyhands.cluster.client import Cluster
from manyhands.cluster.code import Code
from manyhands.cluster.identity import open_identity
from manyhands.cluster.routes import Role
from manyhands.testing.broker import free_ports
from manyhands.testing.processes import end_all, is_gone

WAIT_S = 120.0  # for what takes a moment; nothing is measured by it
MARK = "UP_TEST"

# Whoever runs the tests in the background may have SIGINT ignored.
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from manyhands.cli.main import main
main()
"""


class World:
    """The folders of one cluster, and the processes that carry its mark."""

    def __init__(self, folder):
        self.folder = folder
        self.state, self.logs = folder / "state", folder / "logs"
        self.mark = secrets.token_hex(8)
        # Its hosts have shares of the CPUs, on machines with GPUs too.
        self.environ = {**os.environ, MARK: self.mark, "CUDA_VISIBLE_DEVICES": ""}
        # One that no outgoing connection is given: agents redial it while nobody listens there.
        self.port = free_ports().amqp
        self._stack = contextlib.ExitStack()
        self.cluster = None

    def up(self, *options, ready=True):
        """Starts it, at the port that it had, and waits until it is ready."""
        running = Running(self, options)
        self._stack.callback(running.close)
        if ready:
            said = running.ready()
            self.port = int(said["url"].rpartition(":")[2])
            self.cluster = self._stack.enter_context(Cluster(state=self.state))
        return running

    def command(self, *arguments, **popen):
        """`manyhands ARGUMENTS` to its end."""
        return subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "stdin": subprocess.DEVNULL,
                "env": self.environ,
                "cwd": self.folder,
                "text": True,
                "timeout": WAIT_S,
                "check": False,
                **popen,
            },
        )

    def start(self, *arguments, **popen):
        """`manyhands ARGUMENTS` under way."""
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            **{"env": self.environ, "cwd": self.folder, "start_new_session": True, **popen},
        )
        self._stack.callback(end, process)
        return process

    def join(self, name="other", port=None, *, code=None, typed=False):
        """`manyhands agent` with a code, by default the one that `up` printed: a host of one slot
        that nobody starts again. `port` leads to the coordinator. `typed`: the code is an argument.
        """
        code = code or self._join_code(port or self.port)
        with (self.folder / f"{name}.err").open("ab") as errors:
            agent = self.start(
                *(
                    "agent",
                    code if typed else "-",
                    "--state",
                    str(self.folder / name),
                    "--name",
                    name,
                ),
                *("--slots", "1"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._stack.callback(agent.stdout.close)
        with agent.stdin:
            agent.stdin.write(b"" if typed else code.encode())
        agent.stdin = None
        return agent

    def _join_code(self, port):
        identity = open_identity(self.state)
        return Code(
            role=Role.AGENT,
            host="127.0.0.1",
            port=port,
            token=identity.tokens[Role.AGENT],
            fingerprint=identity.fingerprint,
        ).pack()

    def processes(self):
        """Everything that the cluster started and that lives: agents and ranks."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and not is_gone(process):
                    found.append(process)
        return found

    def submit(self, script, **spec):
        """A job that is a shell script."""
        spec = {"workdir": str(self.folder), "grace_s": 10.0, **spec}
        return self.cluster.submit(["sh", "-c", script], **spec)

    def submit_python(self, program, **spec):
        """A job that is a program, in a file of the job's folder."""
        file = self.folder / f"program-{secrets.token_hex(4)}.py"
        file.write_text(program)
        # What torch makes there for its compiler would be left in the folder for other things.
        env = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        spec = {"workdir": str(self.folder), "env": env, **spec}
        return self.cluster.submit(["python", file.name, *spec.pop("arguments", ())], **spec)

    def states(self, job):
        """All that it has been, in order."""
        return [step.state for step in self.cluster.history(job.id)]

    def text(self, job, rank, attempt=0):
        """All that a rank of an attempt that is over has written."""
        return b"".join(self.cluster.logs(job.id, rank=rank, attempt=attempt, follow=True)).decode()

    def until(self, question, what):
        deadline = time.monotonic() + WAIT_S
        while not (answer := question()):
            assert time.monotonic() < deadline, what
            time.sleep(0.02)
        return answer

    def until_state(self, job, *states):
        self.until(lambda: self.cluster.job(job.id).state in states, f"job {job.id}: {states}")

    def pid_in(self, name):
        """The number in a file that a job writes (and renames: it is whole), once it is there."""
        file = self.folder / name
        self.until(file.exists, name)
        return psutil.Process(int(file.read_text()))

    def until_gone(self, *processes):
        self.until(lambda: all(map(is_gone, processes)), f"still there: {processes}")

    def close(self):
        self._stack.close()
        end_all(self.processes())


def command_of(process):
    """Its words; none of one that has just gone."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def environ_of(process):
    try:
        return process.environ()
    except psutil.NoSuchProcess:
        return {}


class Running:
    """One `manyhands up`."""

    def __init__(self, world, options):
        self.errors = world.folder / "up.err"
        bind = () if "--bind" in options else ("--bind", f"127.0.0.1:{world.port}")
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", MAIN, "up", "--json", *bind),
                    *("--state", str(world.state), "--logdir", str(world.logs), *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=world.environ,
                cwd=world.folder,
                start_new_session=True,
            )

    def ready(self):
        line = self.process.stdout.readline()
        assert line, self.said()
        return json.loads(line)

    def said(self):
        return self.errors.read_text()

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        code = self.process.wait(WAIT_S)
        assert "Traceback" not in self.said(), self.said()
        return code

    def end(self):
        self.process.terminate()
        return self.wait()

    def close(self):
        end(self.process)
        self.process.stdout.close()


def end(process):
    if process.poll() is None:
        process.kill()
        process.wait(WAIT_S)
