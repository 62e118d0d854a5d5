"""Free memory: of this machine, and of machines written down as files."""

import pytest

from manyhands.planner.memory import free_memory, host_memory

MIB = 1 << 20


def machine(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


MEMINFO = {"proc/meminfo": "MemTotal:  2048 kB\nMemAvailable:    1024 kB\nHugePages_Total: 0\n"}


def test_this_machine_has_some():
    free = free_memory()
    assert free is not None
    assert MIB < free < 1 << 50
    assert free_memory("meta") is None


def test_without_cgroups_it_is_what_the_machine_says(tmp_path):
    assert host_memory(machine(tmp_path, MEMINFO)) == MIB


def test_a_system_that_says_nothing(tmp_path):
    assert host_memory(tmp_path) is None


@pytest.mark.parametrize(("limit", "free"), [("600000", 600_000 - 500_000 + 1000), ("max", MIB)])
def test_the_limit_of_a_cgroup(tmp_path, limit, free):
    """What its file cache holds can be had."""
    group = "sys/fs/cgroup/jobs/one"
    files = {
        "proc/self/cgroup": "0::/jobs/one\n",
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": "500000\n",
        f"{group}/memory.stat": "anon 7\ninactive_file 1000\n",
    }
    assert host_memory(machine(tmp_path, MEMINFO | files)) == free


def test_the_limit_of_a_group_above(tmp_path):
    files = {
        "proc/self/cgroup": "0::/jobs/one\n",
        "sys/fs/cgroup/jobs/one/memory.max": "900000\n",
        "sys/fs/cgroup/jobs/one/memory.current": "0\n",
        "sys/fs/cgroup/jobs/memory.max": "800000\n",
        "sys/fs/cgroup/jobs/memory.current": "799000\n",
    }
    assert host_memory(machine(tmp_path, MEMINFO | files)) == 1000


def test_a_container_of_cgroups_1_whose_path_is_the_hosts(tmp_path):
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/\n0::/\n",
        f"{mount}/memory.limit_in_bytes": "300000\n",
        f"{mount}/memory.usage_in_bytes": "100000\n",
        f"{mount}/memory.stat": "inactive_file 5\ntotal_inactive_file 50\n",
    }
    assert host_memory(machine(tmp_path, MEMINFO | files)) == 200_050


def test_a_group_over_its_limit_has_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
    }
    assert host_memory(machine(tmp_path, MEMINFO | files)) == 0
