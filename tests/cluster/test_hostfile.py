"""Hostfiles: the seed's lines, slots, comments, and every error with its line."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.hostfile import host_name, parse_hostfile, read_hostfile
from manyhands.cluster.job import NAME
from manyhands.core.errors import SettingsError


def hosts(text):
    return [(host.address, host.gpus, host.slots) for host in parse_hostfile(text)]


def test_the_file_of_deeppools_readme():
    text = "#address,gpu_idx\n127.0.0.1,0\n127.0.0.1,1\n127.0.0.1,2\n127.0.0.1,3\n"
    assert hosts(text) == [("127.0.0.1", (0, 1, 2, 3), None)]
    (host,) = parse_hostfile(text)
    assert (host.name, host.line, host.is_here) == ("127.0.0.1", 2, True)


def test_all_forms_in_one_file():
    text = """
# a rack
/ which DeepPool takes for a comment too
10.0.0.7, 0-3        # four of it
ann@node1 slots=8
node2\t# all it has
10.0.0.7,7
node-3.example.org   slots = 2
"""
    assert hosts(text) == [
        ("10.0.0.7", (0, 1, 2, 3, 7), None),
        ("ann@node1", (), 8),
        ("node2", (), None),
        ("node-3.example.org", (), 2),
    ]
    assert [host.is_here for host in parse_hostfile(text)] == [False] * 4


@pytest.mark.parametrize(
    ("line", "address", "name"),
    [
        ("::1,0", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.2 slots=1", "127.0.0.2", "127.0.0.2"),
        ("[2001:db8::7],0", "2001:db8::7", "ip6-2001-db8--7"),
        ("2001:DB8::7 slots=1", "2001:db8::7", "ip6-2001-db8--7"),
        ("fe80::1%eth0,1", "fe80::1%eth0", "ip6-fe80--1-eth0"),
        ("root@[2001:db8::7]", "root@2001:db8::7", "ip6-2001-db8--7"),
        ("Node1.Example.ORG", "node1.example.org", "node1.example.org"),
    ],
)
def test_addresses(line, address, name):
    (host,) = parse_hostfile(line)
    assert (host.address, host.name) == (address, name)
    assert re.fullmatch(NAME, host.name)


def test_another_user_of_this_machine_is_reached_by_ssh():
    (host,) = parse_hostfile("ann@localhost")
    assert (host.address, host.is_here) == ("ann@127.0.0.1", False)


def test_windows_files(tmp_path):
    file = tmp_path / "hosts.txt"
    file.write_bytes("\ufeff#address,gpu_idx\r\n127.0.0.1,0\r\n".encode())
    assert [host.gpus for host in read_hostfile(file)] == [(0,)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("127.0.0.1,zero", "expected a GPU after the comma"),
        ("127.0.0.1,", "expected a GPU after the comma"),
        ("127.0.0.1,-1", "expected a GPU after the comma"),
        ("127.0.0.1,3-0", "the first is above the last"),
        ("127.0.0.1,0-9999", "above 4095"),
        ("address,gpu_idx", "expected a GPU after the comma"),
        (",0", "is no address"),
        ("127.0.0.300,0", "127.0.0.300 is no IPv4 address"),
        ("2001:db8:::7", "is no IPv6 address"),
        ("node1:2222", "has a port"),
        ("[node1]", "is no IPv6 address"),
        ("-oProxyCommand=x", "is no address"),
        ("-l@node1", "is no user name"),
        ("a b@node1", "expected ADDRESS,GPU or HOST [slots=N]"),
        ("node1 slots=0", "slots=0 is not between 1 and 4096"),
        ("node1 slots=99999999999999", "is not between"),
        ("node1 slots=x", "expected ADDRESS,GPU or HOST [slots=N], got 'node1 slots=x'"),
        ("node1 gpus=4", "expected ADDRESS,GPU or HOST [slots=N]"),
        ("node1;reboot", "is no address"),
        ("x" * 64, "is no address"),
        ("a..b", "is no address"),
        ("fe80::1%$(x)", "cannot be made a host's name"),
        ("ann@[fe80::1%" + "e" * 200 + "]", "cannot be made a host's name"),
        ("fe80::1%a/b", "is no IPv6 address"),
    ],
)
def test_a_line_that_cannot_be_used(line, words):
    with pytest.raises(SettingsError) as caught:
        parse_hostfile(f"# first\n{line}\n", "hosts.txt")
    assert caught.value.message.startswith("hosts.txt:2: ")
    assert words in caught.value.message
    assert "hint: one host a line" in str(caught.value)


def test_every_error_at_once():
    text = "127.0.0.1,0\n127.0.0.1,x\nnode1 slots=2\n127.0.0.1,0\nnode1,1\nann@node1\n"
    with pytest.raises(SettingsError) as caught:
        parse_hostfile(text, "hosts.txt")
    first, *lines = caught.value.message.splitlines()
    assert first == "hosts.txt cannot be used:"
    assert [line.strip() for line in lines] == [
        "hosts.txt:2: expected a GPU after the comma, such as 0 or 0-3, got 'x'",
        "hosts.txt:4: GPU 0 of 127.0.0.1 is named twice (see line 1)",
        "hosts.txt:5: node1 is in line 3 already; only lines with a GPU each can be many",
        "hosts.txt:6: ann@node1 and node1 (line 3) are one host: name it once",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n/ here\n"])
def test_a_file_without_hosts(text):
    with pytest.raises(SettingsError, match="names no host"):
        parse_hostfile(text)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"node1\n\xff\xfe\n")
    with pytest.raises(SettingsError, match=r"bytes:2: this is no text"):
        read_hostfile(tmp_path / "bytes")


@given(st.text(alphabet="ab1.,:@#/[]-=% \tslot\n", max_size=60))
def test_any_text_is_hosts_or_a_clear_error(text):
    try:
        found = parse_hostfile(text)
    except SettingsError:
        return
    names = [host.name for host in found]
    assert len(set(names)) == len(names) > 0
    for host in found:
        assert re.fullmatch(NAME, host.name), host
        assert not host.address.startswith("-")
        assert host.name == host_name(host.address)
        assert len(set(host.gpus)) == len(host.gpus)
