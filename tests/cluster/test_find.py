"""Finding a coordinator: codes, and what comes before what; no token in the clear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.code import Code, read_code
from manyhands.cluster.find import find_coordinator
from manyhands.cluster.identity import open_identity, write_address
from manyhands.cluster.routes import Role
from manyhands.core.errors import AddressError, NoMeetingPoint, SettingsError

PIN = "ab" * 32


@given(
    st.sampled_from(Role),
    st.tuples(st.text("abc.-019", min_size=1), st.just(PIN))
    | st.tuples(st.sampled_from(["127.0.0.1", "::1", "localhost"]), st.sampled_from(["", PIN])),
    st.integers(1, 65535),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
)
def test_codes_keep_everything(role, place, port, token):
    host, pin = place
    code = Code(role=role, host=host, port=port, token=token, fingerprint=pin)
    assert read_code(code.pack()) == read_code(f" '{code.pack()}'\n") == code


def test_codes_that_are_none():
    packed = Code(role=Role.USER, host="h", port=1, token="SECRET-TOKEN", fingerprint=PIN).pack()
    for text in (packed[:-1], packed[:9] + packed[10:], packed + "!", "mhc1-", "mh1-x", "x", ""):
        with pytest.raises(AddressError) as caught:
            read_code(text)
        assert packed[8:20] not in str(caught.value)


@pytest.mark.parametrize("role", Role)
def test_a_code_that_would_send_its_token_in_the_clear_is_refused(role):
    for host in ("192.0.2.1", "box", "0.0.0.0"):
        with pytest.raises(AddressError, match="in the clear"):
            read_code(Code(role=role, host=host, port=1, token="t" * 20).pack())


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 0}, {"port": 70_000}, {"port": -1}, {"host": ""}, {"host": "a\r\nb"},
        {"token": ""}, {"token": "SECRET\nX: y"}, {"token": "SECRET\u20ac"}, {"token": "SECRET x"},
    ],
)  # fmt: skip
def test_codes_that_nothing_can_be_done_with(wrong):
    right = {"role": Role.USER, "host": "h", "port": 1, "token": "SECRET", "fingerprint": PIN}
    with pytest.raises(AddressError, match="cannot be used") as caught:
        read_code(Code(**{**right, **wrong}).pack())
    assert "SECRET" not in str(caught.value)


def test_a_code_does_not_show_its_token():
    code = Code(role=Role.USER, host="h", port=1, token="SECRET", fingerprint=PIN)
    assert "SECRET" not in f"{code} {code!r}"
    assert str(code) == "https://h:1"


# Finding


@pytest.fixture
def state(tmp_path):
    open_identity(tmp_path / "manyhands" / "cluster")
    return tmp_path / "manyhands" / "cluster"


def find(address=None, *, state=None, environ=(), **given):
    return find_coordinator(address, state=state, environ=dict(environ), **given)


def test_argument_before_environment_before_state_before_default(state, tmp_path):
    identity = open_identity(state)
    home = {"XDG_STATE_HOME": str(tmp_path)}
    found = find(environ=home)
    assert (found.host, found.port) == ("127.0.0.1", 12347)
    assert found.fingerprint == identity.fingerprint
    assert found.token == identity.tokens[Role.USER]
    write_address(state, "https://10.0.0.5:99")
    found = find(environ=home)
    assert (found.host, found.port) == ("10.0.0.5", 99)
    assert found.fingerprint == identity.fingerprint
    environ = {
        **home,
        "MANYHANDS_COORDINATOR": "box:7", "MANYHANDS_TOKEN": "t", "MANYHANDS_FINGERPRINT": PIN,
    }  # fmt: skip
    found = find(environ=environ)
    assert (found.host, found.port, found.token, found.fingerprint) == ("box", 7, "t", PIN)
    other = "cd" * 32
    found = find("[::1]:8", environ=environ, token="u", fingerprint=other)
    assert (found.host, found.port, found.token, found.fingerprint) == ("::1", 8, "u", other)
    # Another machine: everything by the environment, no folder at all.
    found = find(environ={**environ, "XDG_STATE_HOME": str(tmp_path / "none")})
    assert found.host == "box"


def test_a_folder_that_is_given_is_not_mixed_with_the_environment(state):
    """It may be about another cluster, which would be shown a token of this one."""
    identity = open_identity(state)
    write_address(state, "https://10.0.0.5:99")
    environ = {
        "MANYHANDS_COORDINATOR": "box:7", "MANYHANDS_TOKEN": "t", "MANYHANDS_FINGERPRINT": PIN,
    }  # fmt: skip
    found = find(state=state, environ=environ)
    assert (found.host, found.port) == ("10.0.0.5", 99)
    assert found.token == identity.tokens[Role.USER]
    assert found.fingerprint == identity.fingerprint


def test_plain_http_is_spoken_where_somebody_said_so(state):
    write_address(state, "https://box:99")
    pin = open_identity(state).fingerprint
    assert find("127.0.0.1:99", state=state).fingerprint == pin
    assert find("127.0.0.1:98", state=state).fingerprint == pin
    assert not find("http://127.0.0.1:99", state=state).fingerprint
    write_address(state, "http://127.0.0.1:99")
    assert not find(state=state).fingerprint
    assert not find("localhost:99", state=state).fingerprint
    assert find("127.0.0.1:98", state=state).fingerprint == pin
    assert find("box:99", state=state).fingerprint == pin
    assert find("https://127.0.0.1:99", state=state).fingerprint == pin


def test_a_user_code_is_an_address(state):
    code = Code(role=Role.USER, host="box", port=5, token="t", fingerprint=PIN)
    assert find(code.pack(), state=state) == code
    assert find(environ={"MANYHANDS_COORDINATOR": code.pack()}) == code
    (state / "address").write_bytes(b"\xff\xfe")  # of a folder that cannot be read
    with pytest.raises(SettingsError, match="not text") as caught:
        find(state=state)
    assert "set MANYHANDS_COORDINATOR to that" in caught.value.hint
    assert find(code.pack(), state=state) == code
    agents = Code(role=Role.AGENT, host="box", port=5, token="t", fingerprint=PIN)
    with pytest.raises(AddressError, match="agents"):
        find(agents.pack(), state=state)


def test_what_would_send_a_token_in_the_clear_is_refused(state, tmp_path):
    with pytest.raises(AddressError, match="in the clear"):
        find("http://10.0.0.5:1", state=state)
    for address in ("10.0.0.5:1", "127.0.0.1:1"):
        with pytest.raises(AddressError, match="certificate"):
            find(address, state=tmp_path / "none", token="t")
    with pytest.raises(AddressError, match="HOST:PORT"):
        find("ftp://x", state=state)
    with pytest.raises(AddressError):
        find("127.0.0.1:12:34", state=state)


def test_no_token(tmp_path, state):
    with pytest.raises(NoMeetingPoint, match="manyhands up"):
        find(state=tmp_path / "none")
    with pytest.raises(AddressError, match="characters"):
        find(state=state, token="a\r\nX: y")
    (state / "token").unlink()
    write_address(state, "https://127.0.0.1:99")
    with pytest.raises(NoMeetingPoint) as caught:  # alone, the token's variable is not looked at
        find(environ={"XDG_STATE_HOME": str(tmp_path), "MANYHANDS_TOKEN": "t"})
    assert "MANYHANDS_COORDINATOR with MANYHANDS_TOKEN" in caught.value.hint
    (state / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="token"):
        find(state=state)
    (state / "cert.pem").write_text("nonsense")
    with pytest.raises(SettingsError, match="certificate"):
        find("10.0.0.5:1", state=state, token="t")


def test_where_the_address_is_the_folders_so_are_token_and_certificate(state, tmp_path):
    """MANYHANDS_TOKEN and MANYHANDS_FINGERPRINT may be about somebody's hub."""
    identity = open_identity(state)
    write_address(state, "https://127.0.0.1:99")
    environ = {
        "XDG_STATE_HOME": str(tmp_path), "MANYHANDS_TOKEN": "t", "MANYHANDS_FINGERPRINT": PIN,
    }  # fmt: skip
    found = find(environ=environ)
    assert (found.port, found.token) == (99, identity.tokens[Role.USER])
    assert found.fingerprint == identity.fingerprint
    assert find(environ=environ, token="u").token == "u"
