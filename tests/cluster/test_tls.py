"""TLS: the certificate is checked before a token is shown, wherever the server is."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from manyhands.cluster.client import Cluster
from manyhands.cluster.code import read_code
from manyhands.cluster.dial import CoordinatorRefused, CoordinatorUnreachable, Dialler
from manyhands.cluster.identity import open_identity, write_address
from manyhands.cluster.limits import HttpLimits
from manyhands.cluster.routes import Role
from manyhands.cluster.server import Server
from manyhands.core.errors import SettingsError
from manyhands.links.tls import client_context, server_context
from tests.cluster.conftest import ANSWER_S, hear


@pytest.fixture
def secure(serve):
    return serve(bind="0.0.0.0:0")


def test_beyond_loopback_there_is_tls_with_the_pinned_certificate(secure):
    code = secure.server.code(Role.USER, host="127.0.0.1")
    assert secure.server.url.startswith("https://")
    with Cluster(code) as cluster:
        assert cluster.submit(["x"]).id == 1
    raw = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    raw.check_hostname, raw.verify_mode = False, ssl.CERT_NONE
    raw.maximum_version = ssl.TLSVersion.TLSv1_2
    with secure.dial() as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        raw.wrap_socket(sock)


def test_another_fingerprint_is_refused_before_the_token_is_shown(secure, serve):
    other = serve(bind="0.0.0.0:0")
    at = f"127.0.0.1:{secure.server.port}"
    asked = Cluster(at, token=secure.user, fingerprint=other.server.fingerprint)
    with asked, pytest.raises(CoordinatorRefused) as caught:
        asked.info()
    assert caught.value.code == "fingerprint"
    assert secure.user not in str(caught.value)


def test_who_listens_in_place_of_a_coordinator_is_shown_no_token(tmp_path):
    """Another user of this machine, at the address of a cluster that is down: he has no key."""
    state, other = tmp_path / "state", open_identity(tmp_path / "other")
    token = open_identity(state).tokens[Role.USER]
    context = server_context(other.key_pem, other.certificate_pem)
    heard = []

    def listen(listening, wrap):
        sock, _ = listening.accept()
        sock.settimeout(ANSWER_S)
        try:
            with context.wrap_socket(sock, server_side=True) if wrap else sock as line:
                heard.append(hear(line))
        except (ssl.SSLError, ConnectionError):
            heard.append(b"")

    for wrap in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            write_address(state, f"https://127.0.0.1:{listening.getsockname()[1]}")
            thread = threading.Thread(target=listen, args=(listening, wrap))
            thread.start()
            with Cluster(state=state) as cluster:
                # He who does not speak TLS says nothing, and the handshake would wait.
                cluster._dialler._connect_s = ANSWER_S if wrap else 0.2
                with pytest.raises((CoordinatorRefused, CoordinatorUnreachable)):
                    cluster.jobs()
            thread.join()
    assert len(heard) == 2
    assert not [data for data in heard if token.encode() in data or b"HTTP" in data]


def test_plain_http_is_for_loopback(served):
    with pytest.raises(SettingsError, match="in the clear"):
        Server(served.desk, served.logs, served.identity, bind="0.0.0.0:0", plain=True,
               on_shutdown=lambda: None)  # fmt: skip


def test_a_program_that_knows_certificates_can_check_ours(serve):
    served = serve(plain=False)
    context = ssl.create_default_context(cafile=served.state / "cert.pem")
    for name in ("127.0.0.1", "localhost"):
        with context.wrap_socket(served.dial(), server_hostname=name) as sock:
            sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert hear(sock).startswith(b"HTTP/1.1 401")


def test_an_idle_caller_does_not_keep_a_server_from_closing(secure):
    """TLS would wait for his goodbye, for longer than this test may take."""
    clusters = [Cluster(secure.server.code(Role.USER, host="127.0.0.1")) for _ in range(3)]
    for cluster in clusters:
        cluster.info()
    secure.server.close()
    for cluster in clusters:
        with pytest.raises(CoordinatorUnreachable):
            cluster.info()
        cluster.close()


def test_plain_http_at_a_tls_port(secure):
    assert b"HTTP/1.1" not in secure.say(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    at = f"127.0.0.1:{secure.server.port}"
    plain = Cluster(f"http://{at}", token=secure.user, state=secure.state / "none")
    with plain, pytest.raises(CoordinatorUnreachable, match="MANYHANDS_FINGERPRINT"):
        plain.info()


def test_tls_at_a_plain_port(served):
    code = read_code(served.server.code(Role.USER))
    asked = Cluster(f"127.0.0.1:{code.port}", token=code.token, fingerprint="ab" * 32)
    with asked, pytest.raises(CoordinatorUnreachable, match="TLS"):
        asked.info()


def test_half_a_handshake_has_an_end(serve):
    served = serve(bind="0.0.0.0:0", limits=HttpLimits(headers_s=0.2))
    with served.dial() as sock:
        sock.sendall(b"\x16\x03\x01")
        assert hear(sock) == b""


def test_beyond_loopback_names_are_known_and_addresses_are_addresses(secure):
    code = read_code(secure.server.code(Role.USER, host="127.0.0.1"))
    dialler = Dialler(code)
    assert dialler.ask("GET", "/v1/info").status == 200
    dialler.close()


def test_beyond_loopback_a_foreign_name_is_refused_too(secure):
    """A page whose name was made to lead here (DNS rebinding)."""
    context = client_context()
    for host, status in (("evil.example", b"421"), ("192.0.2.1", b"200"), ("localhost", b"200")):
        with context.wrap_socket(secure.dial()) as sock:
            lines = [f"GET /v1/info HTTP/1.1\r\nHost: {host}", "Connection: close"]
            lines.append(f"Authorization: Bearer {secure.user}\r\n\r\n")
            sock.sendall("\r\n".join(lines).encode())
            assert hear(sock).split()[1] == status
