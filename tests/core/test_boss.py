"""Where a boss listens and a worker dials, and when that needs a token."""

import pytest

from manyhands.core.address import HubAddress, parse_address
from manyhands.core.boss import Listening, dialling, lines_for, listening, port_of
from manyhands.core.errors import AddressError, NoMeetingPoint, SettingsError
from manyhands.links.dial import check_security
from manyhands.links.hub import Hub

PIN = "ab" * 32


def bound(bind, advertise=None, *, insecure=False, exposed=False):
    return Listening(bind=bind, advertise=advertise, insecure=insecure, exposed=exposed)


def test_on_loopback_host_and_port_suffice():
    plain = bound("127.0.0.1:1024", insecure=True)
    assert listening({}) == plain
    assert listening({"MODEL_HOST": "127.0.0.1"}, insecure=True) == plain
    assert listening({"MODEL_HOST": "::1", "MODEL_PORT": "0"}).bind == "[::1]:0"
    assert listening({"MODEL_HOST": "10.0.0.1"}, host="localhost", port=5).bind == "localhost:5"
    address = dialling({"MODEL_HOST": "127.0.0.1", "MODEL_PORT": "7"}, run="r")
    assert address == HubAddress(host="127.0.0.1", port=7, run="r", insecure=True)
    assert lines_for(address) == ["MODEL_HOST=127.0.0.1", "MODEL_PORT=7"]


def test_elsewhere_a_boss_has_tls_and_a_worker_needs_the_token():
    far = {"MODEL_HOST": "gpu.example"}
    assert listening(far) == bound("0.0.0.0:1024", "gpu.example:1024")
    assert listening({"MODEL_HOST": "0.0.0.0"}) == bound("0.0.0.0:1024")
    assert listening({"MODEL_HOST": "2001:db8::1"}).bind == "[::]:1024"
    assert listening(far, port=0).advertise == "gpu.example"
    with pytest.raises(AddressError, match="MODEL_TOKEN is not set"):
        dialling(far, run="r")
    boss = HubAddress(host="gpu.example", port=1024, token="secret", fingerprint=PIN)
    lines = lines_for(boss)
    assert [line.split("=")[0] for line in lines] == ["MODEL_HOST", "MODEL_PORT", "MODEL_TOKEN"]
    environ = dict(line.split("=", 1) for line in lines)
    assert dialling(environ, run="r") == HubAddress(
        host="gpu.example", port=1024, run="r", token="secret", fingerprint=PIN
    )
    # By another way to the same boss, also from its own machine.
    near = dialling(environ | {"MODEL_HOST": "127.0.0.1", "MODEL_PORT": "9"}, run="r")
    assert (near.host, near.port, near.fingerprint, near.insecure) == ("127.0.0.1", 9, PIN, False)


def test_elsewhere_without_a_token_both_sides_must_say_insecure():
    far = {"MODEL_HOST": "10.0.0.1"}
    assert listening(far, insecure=True) == bound(
        "0.0.0.0:1024", "10.0.0.1:1024", insecure=True, exposed=True
    )
    address = dialling(far, run="r", insecure=True)
    assert address.insecure
    assert address.exposed


def test_a_token_is_used_if_it_is_there_even_with_insecure():
    boss = HubAddress(host="10.0.0.1", token="secret", fingerprint=PIN)
    environ = {"MODEL_HOST": "10.0.0.1", "MODEL_TOKEN": boss.code()}
    assert not dialling(environ, run="r", insecure=True).insecure


@pytest.mark.parametrize(
    "token",
    ["nonsense", "mh1-nonsense", HubAddress(host="x").code(), "hub://10.0.0.1/x?insecure=1"],
)
def test_a_token_that_is_none_is_refused_and_not_shown(token):
    with pytest.raises(AddressError, match="MODEL_TOKEN") as no:
        dialling({"MODEL_HOST": "10.0.0.1", "MODEL_TOKEN": token}, run="r")
    assert token not in str(no.value)


def test_a_worker_needs_a_host():
    with pytest.raises(NoMeetingPoint, match="MODEL_HOST is not set"):
        dialling({}, run="r")


@pytest.mark.parametrize("text", ["x", "-1", "65536", "1024 ", "²"])
def test_a_port_is_a_number(text):
    with pytest.raises(SettingsError, match="MODEL_PORT"):
        port_of({"MODEL_PORT": text})


def test_no_url_or_code_is_insecure_beyond_loopback():
    check_security(dialling({"MODEL_HOST": "10.0.0.1"}, run="r", insecure=True))
    for url in ("hub://10.0.0.1/x?insecure=1", HubAddress(host="10.0.0.1", exposed=True).code()):
        with pytest.raises(AddressError, match="insecure=1 is for loopback"):
            check_security(parse_address(url))
    with pytest.raises(AddressError, match="unknown options exposed"):
        parse_address("hub://10.0.0.1/x?insecure=1&exposed=1")
    with pytest.raises(AddressError, match="would let anybody"):
        Hub("0.0.0.0:0", insecure=True)
