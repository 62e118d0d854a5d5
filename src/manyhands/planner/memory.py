"""Memory: how much of it is free, on the machine and on its devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path("/")


def free_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that a program can have on a device; None where the system does not say.

    On a GPU, what torch has reserved in this process and does not use counts as free.
    """
    import torch  # the machine's own memory is asked for by programs that need no torch

    device = torch.device(device)
    if device.type == "cpu":
        return host_memory()
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_memory(root: Path = ROOT) -> int | None:
    """Bytes that can be had without swapping: the machine's, or what the cgroups leave of them.

    `root` is where proc and sys are.
    """
    machine = _numbers(root / "proc/meminfo").get("MemAvailable:")
    known = [] if machine is None else [machine * 1024]
    return min([*known, *_cgroup_rooms(root)], default=None)


# cgroup v2 and v1: where it is mounted, its limit, its use, the file cache that it gives back.
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = (
    *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "total_inactive_file",
)


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What is free in each memory cgroup above this process that has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, limit_name, use_name, cache_name = _V2
        elif "memory" in controllers.split(","):
            mount, limit_name, use_name, cache_name = _V1
        else:
            continue
        # Inside a container the path may be the host's: then only the mount itself is there.
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            folder = root / mount / group
            limit, use = _text(folder / limit_name).strip(), _text(folder / use_name).strip()
            if limit.isdigit() and use.isdigit():  # not "max"
                cache = _numbers(folder / "memory.stat").get(cache_name, 0)
                yield max(0, int(limit) - int(use) + cache)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number; nothing where there is no such file."""
    words = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""  # another system, another version of cgroups, or not ours to read
