"""Addresses: read, written, damaged, redacted."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.address import (
    AmqpAddress,
    HubAddress,
    LocalAddress,
    check_fingerprint,
    check_run,
    host_port,
    is_loopback,
    parse_address,
    redact,
    split_host_port,
)
from manyhands.core.errors import AddressError

PIN = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("local:///shakes", LocalAddress(run="shakes")),
        ("local://", LocalAddress()),
        ("local:///?run=shakes", LocalAddress(run="shakes")),
        ("hub://box", HubAddress(host="box")),
        ("hub://box:1/shakes", HubAddress(host="box", port=1, run="shakes")),
        ("hub://[::1]:5/r?insecure=1", HubAddress(host="::1", port=5, run="r", insecure=True)),
        (
            f"hub://box/r?token=abc&fingerprint={PIN.upper()}",
            HubAddress(host="box", run="r", token="abc", fingerprint=PIN),
        ),
        (
            "amqps://u:p%40ss@box/vh?run=r&ca_file=/ca.pem",
            AmqpAddress(
                host="box", port=5671, user="u", password="p@ss", vhost="vh", run="r",
                ca_file="/ca.pem",
            ),
        ),
        (
            "amqp://localhost",
            AmqpAddress(host="localhost", port=5672, user="guest", password="guest", tls=False),
        ),
        (
            "amqp://box/%2F?insecure=1",
            AmqpAddress(host="box", port=5672, user="guest", password="guest", tls=False),
        ),
        ("  hub://box/r \n", HubAddress(host="box", run="r")),
    ],
)  # fmt: skip
def test_urls(text, address):
    assert parse_address(text) == address


hosts = st.sampled_from(["box", "10.0.0.1", "::1", "fe80::1", "a.very.long.example.org"])
runs = st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@given(
    hosts, st.integers(1, 65535), runs, st.text(max_size=40), st.binary(min_size=32, max_size=32)
)
def test_join_codes_keep_everything(host, port, run, token, pin):
    address = HubAddress(host=host, port=port, run=run, token=token, fingerprint=pin.hex())
    assert parse_address(address.code()) == address


def test_a_join_code_without_a_fingerprint_is_of_an_insecure_hub():
    address = HubAddress(host="127.0.0.1", port=5, insecure=True)
    assert parse_address(address.code()) == address


@given(st.data())
def test_a_damaged_join_code_is_noticed(data):
    code = HubAddress(host="box", run="r", token="secret-token", fingerprint=PIN).code()
    if data.draw(st.booleans()):
        damaged = code[: data.draw(st.integers(len("mh1-"), len(code) - 1))]
    else:
        place = data.draw(st.integers(len("mh1-"), len(code) - 1))
        damaged = code[:place] + data.draw(st.characters()) + code[place + 1 :]
    if _means_the_same(damaged, code):
        return
    with pytest.raises(AddressError) as caught:
        parse_address(damaged)
    assert caught.value.hint
    assert "secret-token" not in str(caught.value)


def _means_the_same(damaged: str, code: str) -> bool:
    """The last character has bits that carry nothing, and a blank at the end is no damage."""
    same = damaged[:-1] == code[:-1] and len(damaged) == len(code)
    with suppress(AddressError):
        return same and parse_address(damaged) == parse_address(code)
    return False


def test_a_join_code_of_another_release():
    body = msgspec.msgpack.encode(("box", "not a port"))
    sealed = body + zlib.crc32(body).to_bytes(4, "big")
    code = "mh1-" + base64.urlsafe_b64encode(sealed).decode().rstrip("=")
    with pytest.raises(AddressError, match="release"):
        parse_address(code)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "box",
        "box:5",
        "http://box/",
        "hub://",
        "hub:///run",
        "hub://box:notaport/",
        "hub://box:99999/",
        "hub://[::1/",
        "hub://box/r?colour=red",
        "local:///r?token=x",
        "hub://box/../x",
        "hub://box/r?fingerprint=abc",
        "hub://box/" + "r" * 65,
        "hub://box/-r",
        "amqp://box/",
        "amqp://u:p@192.168.1.5/",
        "amqps://u:p@box/v?token=x",
        "mh1-",
        "mh1-!!!!",
        "mh1-AAAA",
        "amqp://user:hunter2@box:port/",
        "ftp://user:hunter2@box/",
        "amqp://user:hunter2/3@box/",
        "amqp://user:hunter2#3@box/",
        "amqp://user:hunter2?3@box/",
    ],
)
def test_what_is_not_an_address_is_an_error_with_a_remedy(text):
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert caught.value.hint
    assert "hunter2" not in str(caught.value)


def test_the_run_may_be_named_beside_the_address_but_not_twice():
    assert parse_address("hub://box", run="r") == HubAddress(host="box", run="r")
    assert parse_address("hub://box/r", run="r").run == "r"
    with pytest.raises(AddressError, match=r"'r'.*'s'") as caught:
        parse_address("hub://box/r", run="s")
    assert caught.value.hint
    with pytest.raises(AddressError):
        parse_address("hub://box", run="not a run")


@pytest.mark.parametrize("run", ["a", "A-1_x.y", "9" * 64])
def test_names_of_runs(run):
    check_run(run)


@pytest.mark.parametrize("run", ["", ".", "..", "-a", "a/b", "a b", "a\n", "ä", "a" * 65])
def test_what_cannot_name_a_run(run):
    with pytest.raises(AddressError) as caught:
        check_run(run)
    assert caught.value.hint


def test_hosts_and_ports():
    assert split_host_port("box", 7) == ("box", 7)
    assert split_host_port("box:5", 7) == ("box", 5)
    assert split_host_port("[::1]:5", 7) == ("::1", 5)
    assert split_host_port(":5", 7) == ("0.0.0.0", 5)
    assert split_host_port("box:0", 7) == ("box", 0)
    assert host_port("::1", 5) == "[::1]:5"
    assert host_port("box", 5) == "box:5"
    with pytest.raises(AddressError) as caught:
        split_host_port("box:many", 7)
    assert caught.value.hint


def test_loopback():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "box", "localhost.example.org"]))


def test_fingerprints():
    assert check_fingerprint("") == ""
    assert check_fingerprint(":".join([PIN[i : i + 2] for i in range(0, 64, 2)]).upper()) == PIN
    with pytest.raises(AddressError):
        check_fingerprint(PIN[:-1])


SECRET = "s3cr3t-Word"


@pytest.mark.parametrize(
    "text",
    [
        f"cannot reach amqps://user:{SECRET}@box:5/v?run=r now",
        f"amqp://:{SECRET}@box/",
        f"amqp://user:{SECRET}/x@box/",
        f"amqp://user:x@{SECRET}@box/",
        f"hub://box/r?token={SECRET}&insecure=1",
        f"hub://box/r?insecure=1&token={SECRET}#x",
        f"hub://box/r?password={SECRET}",
        "see " + HubAddress(host="box", token=SECRET, fingerprint=PIN).code() + ".",
        f"see mhc1-{SECRET} there",
        f"Authorization: Bearer {SECRET}",
    ],
)
def test_redaction(text):
    safe = redact(text)
    assert SECRET not in safe
    assert HubAddress(host="box", token=SECRET, fingerprint=PIN).code() not in safe
    assert "***" in safe


def test_addresses_do_not_show_their_secrets():
    hub = HubAddress(host="box", port=5, run="r", token=SECRET, fingerprint=PIN)
    amqp = AmqpAddress(host="box", port=5, user="u", password=SECRET, vhost="v")
    for address in (hub, amqp, dataclasses.replace(hub, run=None)):
        assert SECRET not in f"{address} {address!r}"
    assert str(hub) == "hub://box:5/r"
    assert str(amqp) == "amqps://u:***@box:5/v"
    assert SECRET not in redact(hub.code())


CODE = HubAddress(host="hub.example", token="T0ken", fingerprint="ab" * 32).code()


@pytest.mark.parametrize(
    "text",
    [
        "guest:SECRETPW@127.0.0.1/vh?run=a",
        "amqp:/guest:SECRETPW@127.0.0.1/vh",
        "amqp://guest:SECRETPW@127.0.0.1:bad/vh",
        f"hub://{CODE.lower()}",
        f"MANYHANDS_URL={CODE}",
        f"hub://{CODE}/run",
    ],
)
def test_what_is_nearly_an_address_is_not_shown_whole(text):
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    said = str(caught.value).lower()
    assert "secret" not in said
    assert CODE.lower()[6:] not in said
    assert "PW" not in redact(text)


def test_a_join_code_with_a_run_or_in_quotes():
    assert parse_address(f"{CODE}?run=mine").run == "mine"
    assert parse_address(f"'{CODE}'") == parse_address(f' "{CODE}" ') == parse_address(CODE)
    with pytest.raises(AddressError, match="takes no option rank"):
        parse_address(f"{CODE}?rank=1")
