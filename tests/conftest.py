"""What holds for every test: a seed, nothing left behind, brokers of our own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("manyhands.testing.contract")

from manyhands.doctor.machine import TRAPS, check_torch  # noqa: E402
from manyhands.testing.broker import Broker  # noqa: E402
from manyhands.testing.leaks import no_leaks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.collectives.backend.crew import Zygote

SEED = 20260101

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it puts into the background, and all that is started from there.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ISA = "ONEDNN_MAX_CPU_ISA"
_TORCH_S = 120.0  # the first import on a machine with other work


def pytest_configure() -> None:
    """A virtual machine may have a processor whose AMX ends whoever uses it; no test is of that."""
    cpuinfo = Path("/proc/cpuinfo")
    named = cpuinfo.exists() and "amx_tile" in cpuinfo.read_text()
    if named and _ISA not in os.environ and TRAPS in check_torch(_TORCH_S).findings:
        os.environ[_ISA] = "AVX512_CORE_FP16"


def pytest_report_header() -> str:
    return f"{_ISA}={os.environ[_ISA]}" if _ISA in os.environ else ""


@pytest.fixture(scope="session", autouse=True)
def _no_settings() -> Iterator[None]:
    """What the developer's shell says about runs and hubs is not for the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MANYHANDS_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:
    """Python keeps this helper for the whole process: start it where no test is blamed for it."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="session")
def shared_brokers() -> list[Broker]:
    """The brokers that outlive a test on purpose."""
    return []


@pytest.fixture(scope="session")
def broker(
    shared_brokers: list[Broker], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    """One RabbitMQ node for all tests that neither stop nor reconfigure it.

    Tests keep apart by names (a run, queues, users, a vhost) of their own.
    """
    # Its folder is not the TMPDIR of the test that happens to ask first.
    node = Broker(folder=tmp_path_factory.mktemp("shared") / "broker")
    with node:
        shared_brokers.append(node)
        yield node
        shared_brokers.remove(node)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts before the leak check of the first test that uses it looks at processes."""
    from tests.collectives.backend.crew import Zygote

    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def hub_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The `manyhands hub` command, plain, on a port of its own."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "manyhands", "hub", "--bind", "127.0.0.1:0", "--insecure"),
            *("--json", "--state", str(tmp_path_factory.mktemp("hub"))),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    yield json.loads(process.stdout.readline())["port"]
    process.terminate()
    process.wait(30)
    process.stdout.close()


@pytest.fixture(scope="session")
def started_gpu() -> None:
    """Has the driver of a GPU, if there is one, open the files that it keeps: before the leak check
    of the first test that uses it looks.
    """
    import torch

    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on the first product of its backward thread
            model = torch.nn.Linear(4, 4).cuda()
            model(torch.zeros(1, 4, device="cuda")).sum().backward()
            torch.cuda.synchronize()


@pytest.fixture
def fresh_broker() -> Iterator[Callable[..., Broker]]:
    """Starts a node of the test's own, `fresh_broker(**arguments of Broker)`, and ends it."""
    with ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(Broker(**arguments))


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _leaves_nothing(
    shared_brokers: list[Broker], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Fails a test that leaves a process, thread, socket or file behind."""
    tmp = tmp_path_factory.mktemp("t")

    def expected() -> set[int]:
        return {pid for node in shared_brokers for pid in node.process_ids()}

    with pytest.MonkeyPatch.context() as patch, no_leaks(tmp=tmp, expected=expected):
        patch.setenv("TMPDIR", str(tmp))
        patch.setattr("tempfile.tempdir", str(tmp))
        yield
    # Thousands of empty folders in the base folder would make each new name slower to find.
    tmp.rmdir()
