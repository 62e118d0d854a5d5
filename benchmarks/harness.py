"""What benchmarks share: meeting points of their own, CPU and memory of processes, the machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Self

import psutil

from manyhands._version import __version__
from manyhands.core.address import HubAddress, parse_address
from manyhands.testing.processes import end_tree


def forget_peaks(pids: list[int]) -> None:
    """Start a new high-water mark of these processes' memory."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peaks_of(pids: list[int]) -> int:
    """The most resident memory these processes had since then, together."""
    return sum(memory_of(pid, "VmHWM") for pid in pids)


def memory_of(pid: int | str, field: str) -> int:
    """One line of a process's status, in bytes; 0 if it has ended (helpers of a broker)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def cpu_of(pids: list[int]) -> float:
    """Seconds of CPU that these processes have used, together."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


class Threads:
    """What this process's threads take from here on: seconds of CPU, of those in the kernel, and
    how often they slept."""

    def __init__(self) -> None:
        self._before = self._all()

    def since(self) -> dict[str, dict[str, float]]:
        """By what they are for: the first word of a thread's name, for one of C++ the system's."""
        known = {thread.native_id: thread.name for thread in threading.enumerate()}
        total: dict[str, Counter[str]] = {}
        for thread, (name, now) in self._all().items():
            taken = Counter(now)
            taken.subtract(self._before.get(thread, (name, Counter()))[1])
            kind = known.get(thread, name).split()[0].replace("MainThread", "main")
            total.setdefault(kind, Counter()).update(taken)
        return {kind: dict(taken) for kind, taken in total.items() if taken["cpu_s"] > 0}

    @staticmethod
    def _all() -> dict[int, tuple[str, Counter[str]]]:
        found = {}
        for folder in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                run_ns = (folder / "schedstat").read_text().split()[0]
                name, _, numbers = (folder / "stat").read_text().rpartition(")")
                status = (folder / "status").read_text()
                slept = status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]
                taken = {
                    "cpu_s": int(run_ns) / 1e9,
                    "system_s": int(numbers.split()[12]) / os.sysconf("SC_CLK_TCK"),
                    "sleeps": float(slept),
                }
                found[int(folder.name)] = name.partition("(")[2] or "?", Counter(taken)
        return found


def mean_of_threads(said: Iterable[dict[str, dict[str, float]]], steps: int) -> dict:
    """What all processes together took a step, by what threads are for; the most first."""
    total: dict[str, Counter[str]] = {}
    for threads in said:
        for kind, taken in threads.items():
            total.setdefault(kind, Counter()).update(taken)
    ordered = sorted(total.items(), key=lambda item: -item[1]["cpu_s"])
    return {kind: {k: v / steps for k, v in taken.items()} for kind, taken in ordered}


def store(target: Path, result: dict, asked: Sequence[str]) -> Path:
    """Write a result; where to, is returned.

    Rows of links that were `asked` for and could not be run are not lost with it: if the file has
    any, it stays as it is, and the result is written beside it.
    """
    told = {row["link"] for row in result["rows"]}
    before = json.loads(target.read_text())["rows"] if target.exists() else []
    lost = sorted({row["link"] for row in before if row["link"] in asked} - told)
    if lost:
        kept, target = target, target.with_suffix(f".without-{'-'.join(lost)}.json")
        print(
            f"\n{'*' * 79}\n{kept} STAYS AS IT WAS: it has rows of {', '.join(lost)}, and this run "
            f"has none.\nThis run is in {target}.\n{'*' * 79}",
            file=sys.stderr,
        )
    target.write_text(json.dumps(result, indent=1) + "\n")
    return target


def median_sent(answers: Iterable[dict]) -> float | None:
    """Bytes that a peer has sent; None of what nobody counts."""
    sent = [answer["sent"] for answer in answers]
    return None if None in sent else statistics.median(sent)


def quantile(values: list[float], q: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, round(q * (len(values) - 1)))]


def machine(device: str = "cpu") -> dict:
    """Where and with what the numbers were measured."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "manyhands": __version__,
    } | ({"gpu": gpu()} if device == "cuda" else {})


def gpu() -> str:
    """Its name."""
    import torch

    return torch.cuda.get_device_name()


@contextlib.contextmanager
def hub_process(*, tls: bool, door: bool = False):
    """A hub of its own; yields its join code and process id.

    By TCP, as between machines, unless `door`.
    """
    with tempfile.TemporaryDirectory() as state:
        options = [*([] if tls else ["--insecure"]), *([] if door else ["--no-door"])]
        command = ["hub", "--bind", "127.0.0.1:0", "--state", state, "--json", *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "manyhands", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # see Worker
        )
        try:
            said = json.loads(process.stdout.readline())
            yield said["code"], process.pid
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def meeting_points(
    stack: contextlib.ExitStack, wanted: Sequence[str]
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Of "hub" (TCP without TLS), "door" (a hub as `manyhands run` has it, whose peers here come by
    its door) and "amqp", those that are: URLs, and the processes behind them."""
    urls: dict[str, str] = {}
    processes: dict[str, list[int]] = {}
    for link in {"hub", "door"} & set(wanted):
        door = link == "door"
        urls[link], pid = stack.enter_context(hub_process(tls=door, door=door))
        processes[link] = [pid]
    if "amqp" in wanted:
        from manyhands.testing.broker import Broker

        broker = stack.enter_context(Broker())
        urls["amqp"], processes["amqp"] = broker.url(), list(broker.process_ids())
    return urls, processes


def run_at(link: str, urls: dict[str, str], run: str) -> str:
    """The address of a run at one of these meeting points, as a user would write it."""
    if link != "hub":
        return f"{urls[link]}?run={run}"
    address = parse_address(urls[link])
    assert isinstance(address, HubAddress)
    return f"hub://{address.host}:{address.port}/{run}?insecure=1"


@contextlib.contextmanager
def tls_broker():
    """A RabbitMQ node; yields its address, that with TLS, and its process ids."""
    import trustme

    from manyhands.testing.broker import Broker, TlsFiles

    with tempfile.TemporaryDirectory() as folder:
        ca, chain, key = (Path(folder) / name for name in ("ca.pem", "cert.pem", "key.pem"))
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(str(ca))
        certificate.cert_chain_pems[0].write_to_path(str(chain))
        certificate.private_key_pem.write_to_path(str(key))
        with Broker(tls=TlsFiles(authority=ca, certificate=chain, key=key)) as broker:
            secured = f"{broker.amqps_url()}?ca_file={ca}"
            yield broker.url(), secured, list(broker.process_ids())


@contextlib.contextmanager
def bare_relay_process(size: int):
    """A relay for one run of `size` peers; yields its port and process id."""
    script = str(Path(__file__).with_name("bare_relay.py"))
    process = subprocess.Popen(
        [sys.executable, script, str(size)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process.stdout.readline().decode().strip(), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Worker:
    """A process of a benchmark: one JSON object a line in, one a line out.

    `with Worker(...)` waits for its end, or makes it end, with all it has started, when the block
    fails: the others it would say goodbye to may be gone.
    """

    def __init__(self, script: str, *args: object, python: str = sys.executable) -> None:
        command = [python, script, *(str(arg) for arg in args)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            # Ctrl-C at the terminal is for the benchmark, which ends its processes itself.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            end_tree(self.process, patience_s=0.0)
        self.close()

    def say(self, **words: object) -> None:
        """Give it something to do."""
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self, crew: list[Worker] = (), limit_s: float = math.inf) -> dict:
        """Its next answer; not waited for once somebody of its crew has ended.

        Raises TimeoutError after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while not select.select([self.process.stdout], [], [], 1.0)[0]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {limit_s:g} s")
            for other in crew:
                if other.process.poll() is not None:
                    raise RuntimeError(f"a process of the crew ended with {other.process.poll()}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """No more to do."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
