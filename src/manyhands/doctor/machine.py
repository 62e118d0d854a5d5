"""This machine: versions, torch and its devices, memory, limits, clocks."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NamedTuple, cast

from manyhands._version import __version__
from manyhands.doctor.report import Finding, Outcome, ok, problem, warning
from manyhands.planner.memory import host_memory

MIN_PYTHON = (3, 11)
TESTED_TORCH = ("2.11", "2.13", "2.15")
MIN_OPEN_FILES = 1024
MIN_DISK_BYTES = 1 << 30
RELEASED_S = 1767225600  # 2026-01-01: no right clock shows a time before this program was written

# In a process of its own: a broken or hanging installation must not take the report with it.
_TORCH_PROBE = """
import json, torch
devices = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        devices.append({"device": f"cuda:{i}", "name": torch.cuda.get_device_name(i),
                        "total_bytes": total, "free_bytes": free})
if torch.backends.mps.is_available():
    devices.append({"device": "mps", "name": "Apple GPU"})
print(json.dumps({"version": torch.__version__, "cuda_build": torch.version.cuda,
                  "threads": torch.get_num_threads(), "devices": devices}), flush=True)
a = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(a, a)  # the instructions that a processor may have in name only
"""

TRAPS = problem(
    "processor",
    "a product of bf16 matrices ends a process: this machine says that it has instructions (AMX, "
    "as a rule) which it does not let programs use",
    "for every program that trains here: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
)


class Requirement(NamedTuple):
    """A package and the lowest version that will do."""

    package: str
    at_least: str


# -- versions -----------------------------------------------------------------------------------


def check_python(version: Sequence[int]) -> Finding:
    """Whether this Python is new enough."""
    text = ".".join(str(part) for part in version[:3])
    if tuple(version[:2]) < MIN_PYTHON:
        wanted = ".".join(str(part) for part in MIN_PYTHON)
        remedy = f"install Python {wanted} or newer and make a new virtual environment with it"
        return problem("python", f"{text} is older than {wanted}", remedy, version=text)
    return ok("python", text, version=text)


def check_release() -> Finding:
    """Which manyhands this is."""
    return ok("manyhands", __version__, version=__version__)


def check_platform(*, posix: bool, gathers: bool) -> Finding:
    """Whether the system has what links are built on: POSIX, and writes that gather."""
    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    if posix and gathers:
        return ok("platform", name, system=platform.system(), machine=platform.machine())
    remedy = "use Linux or macOS; on Windows, WSL 2"
    return problem("platform", f"{name} is not POSIX with sendmsg", remedy)


def read_requirements(lines: Sequence[str]) -> tuple[Requirement, ...]:
    """The lower bounds among the requirements of a package; those under a condition are left."""
    found: list[Requirement] = []
    for line in lines:
        match = re.fullmatch(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?>=\s*([\d.]+)[^;]*", line.strip())
        if match is not None:
            found.append(Requirement(match[1], match[2]))
    return tuple(found)


def check_dependencies(
    requirements: Sequence[Requirement], version_of: Callable[[str], str | None]
) -> Finding:
    """Whether all requirements are installed; one finding that names every one that is not."""
    installed = {r.package: version_of(r.package) for r in requirements}
    missing = [r for r in requirements if installed[r.package] is None]
    old = [
        r for r in requirements if (have := installed[r.package]) and _is_older(have, r.at_least)
    ]
    if missing or old:
        parts = [f"{r.package} is missing" for r in missing]
        parts += [f"{r.package} {installed[r.package]} is older than {r.at_least}" for r in old]
        wanted = " ".join(f"'{r.package}>={r.at_least}'" for r in (*missing, *old))
        remedy = f"type: python -m pip install {wanted}"
        return problem("dependencies", "; ".join(parts), remedy, installed=installed)
    if not requirements:
        remedy = "install it: python -m pip install . (or -e .) in its folder"
        return warning("dependencies", "manyhands runs without being installed", remedy)
    text = ", ".join(f"{package} {version}" for package, version in installed.items())
    return ok("dependencies", text, installed=installed)


def installed_version(package: str) -> str | None:
    """The version of an installed package; None when there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def own_requirements() -> tuple[Requirement, ...]:
    """What manyhands says it needs; nothing when it was not installed."""
    try:
        return read_requirements(metadata.requires("manyhands") or ())
    except metadata.PackageNotFoundError:
        return ()


def _is_older(version: str, than: str) -> bool:
    return _release(version) < _release(than)


def _release(version: str) -> tuple[int, ...]:
    digits = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in digits[0].split(".")) if digits else ()


# -- torch and devices --------------------------------------------------------------------------


def check_torch(limit_s: float, *, python: str = sys.executable) -> Outcome[object]:
    """Import torch in a process of its own; its version and the devices it sees."""
    try:
        done = subprocess.run(  # noqa: S603  (our own text, by the Python that runs us)
            [python, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        traps = done.returncode == -signal.SIGILL and bool(done.stdout)
        if done.returncode == 0 or traps:
            said = judge_torch(cast("dict[str, object]", json.loads(done.stdout)))
            return Outcome(findings=(*said, TRAPS) if traps else said)
        last = (done.stderr.strip() or f"it ended with code {done.returncode}").splitlines()[-1]
        remedy = "type: python -m pip install --force-reinstall torch"
        finding = problem("torch", f"it cannot be imported: {last}", remedy)
    except subprocess.TimeoutExpired:
        remedy = "a cold disk may need a second run; if it stays, reinstall torch"
        finding = problem("torch", f"its import did not end within {limit_s:.0f} s", remedy)
    except (OSError, ValueError) as error:
        remedy = "type: python -m pip install --force-reinstall torch"
        finding = problem("torch", f"it cannot be asked: {error}", remedy)
    return Outcome(findings=(finding,))


def judge_torch(said: dict[str, object]) -> tuple[Finding, ...]:
    """The findings about what the probe of torch has said."""
    version = str(said["version"])
    if any(f"{version}.".startswith(f"{tested}.") for tested in TESTED_TORCH):
        torch = ok("torch", version, version=version, cuda_build=said["cuda_build"])
    else:
        tested = ", ".join(TESTED_TORCH)
        remedy = f"it may well work; what is tested is {tested}: pip install 'torch==2.13.*'"
        torch = warning("torch", f"{version} is not tested", remedy, version=version)
    devices = cast("list[dict[str, object]]", said["devices"])
    shown = ", ".join(_describe_device(device) for device in devices)
    text = shown or f"no GPU: torch computes on {said['threads']} CPU threads"
    return torch, ok("devices", text, devices=devices, threads=said["threads"])


def _describe_device(device: dict[str, object]) -> str:
    text = f"{device['device']} {device['name']}"
    if "total_bytes" not in device:
        return text
    free, total = cast("int", device["free_bytes"]), cast("int", device["total_bytes"])
    return f"{text} ({gib(free)} of {gib(total)} free)"


# -- the machine --------------------------------------------------------------------------------


def check_memory() -> Finding:
    """CPUs that this process may use, and free memory."""
    # macOS knows no affinity.
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = host_memory()
    text = f"{num_cpus} CPUs, " + ("free memory unknown" if free is None else f"{gib(free)} free")
    if free is not None and free < 1 << 30:
        remedy = "close what else runs here: a model, its gradients and its optimizer live in it"
        return warning("memory", text, remedy, num_cpus=num_cpus, free_bytes=free)
    return ok("memory", text, num_cpus=num_cpus, free_bytes=free)


def open_file_limit() -> int | None:
    """How many files this process may have open; None for no limit."""
    try:
        import resource  # not on Windows, where the check of the platform says what to do
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_open_files(limit: int | None) -> Finding:
    """Whether enough files can be open: a hub has a socket a peer."""
    if limit is None:
        return ok("open files", "no limit", limit=None)
    if limit < MIN_OPEN_FILES:
        return warning(
            "open files",
            f"at most {limit} at once; a hub or a loader with many workers needs more",
            f"type, in the shell that starts it: ulimit -n {MIN_OPEN_FILES * 4}",
            limit=limit,
        )
    return ok("open files", f"at most {limit} at once", limit=limit)


def check_disk(folder: str, free: int) -> Finding:
    """Space for temporary files."""
    data: dict[str, object] = {"folder": folder, "free_bytes": free}
    if free < MIN_DISK_BYTES:
        remedy = "make room there, or point TMPDIR to another disk"
        return warning("disk", f"only {gib(free)} free in {folder}", remedy, **data)
    return ok("disk", f"{gib(free)} free in {folder}", **data)


def check_clock(pause_s: float = 0.05) -> Finding:
    """Whether time passes alike on both clocks, and the date can be true."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(pause_s)
    return judge_clock(wall, time.time() - wall, time.monotonic() - steady)


def judge_clock(now_s: float, wall_s: float, steady_s: float) -> Finding:
    """The finding about a pause that took so long on the wall clock and on the steady one."""
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now_s)) + " UTC"
    remedy = "set the clock: sudo timedatectl set-ntp true"
    if now_s < RELEASED_S:
        text = f"it shows {date}, which is past: certificates will seem not valid yet"
        return problem("clock", text, remedy, utc=date)
    if steady_s <= 0 or abs(wall_s - steady_s) > 0.5:
        text = f"the wall clock went {wall_s:.2f} s while {steady_s:.2f} s passed"
        return warning("clock", text, remedy, utc=date)
    return ok("clock", f"{date}; not compared with other machines", utc=date)


def check_machine() -> Outcome[object]:
    """Everything about this machine that takes no time to find out."""
    folder = tempfile.gettempdir()
    findings = (
        check_python(sys.version_info[:3]),
        check_release(),
        check_platform(posix=os.name == "posix", gathers=hasattr(socket.socket, "sendmsg")),
        check_dependencies(own_requirements(), installed_version),
        check_memory(),
        check_open_files(open_file_limit()),
        check_disk(folder, shutil.disk_usage(folder).free),
        check_clock(),
    )
    return Outcome(findings=findings)


def gib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / (1 << 30):.1f} GiB"
