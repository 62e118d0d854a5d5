"""TLS for hubs: a self-signed certificate that peers pin by its fingerprint."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from manyhands.core.errors import Refused


def create_identity(
    common_name: str = "manyhands hub", hosts: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """A new private key and its certificate, both as PEM.

    `hosts`: names and addresses that it is for, for programs that check a certificate by these.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Peers trust the pin, not the dates; a day back for clocks that run behind.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=36500))
    )
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    return (
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def fingerprint_of(certificate_pem: bytes) -> str:
    """SHA-256 of the certificate, as hex."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    return certificate.fingerprint(hashes.SHA256()).hex()


def server_context(key_pem: bytes, certificate_pem: bytes) -> ssl.SSLContext:
    """What the hub accepts connections with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The ssl module loads certificates from files only; the folder is private and short-lived.
    with tempfile.TemporaryDirectory() as folder:
        chain = Path(folder, "hub.pem")
        chain.touch(mode=0o600)
        chain.write_bytes(key_pem + certificate_pem)
        context.load_cert_chain(chain)
    return context


def client_context() -> ssl.SSLContext:
    """What peers dial with; `check_pin` is the verification."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.sslsocket_class = _ClientSocket
    return context


class _ClientSocket(ssl.SSLSocket):
    """Closes itself where wrap_socket would lose it: when the connection is already reset."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Used by wrap_socket alone: we receive by `recv_into`."""
        try:
            return super().recv(buflen, flags)
        except ConnectionError:
            self.close()
            raise


def check_pin(sock: ssl.SSLSocket, fingerprint: str) -> None:
    """Raise Refused unless the far side showed the certificate with this fingerprint."""
    shown = sock.getpeercert(binary_form=True) or b""
    found = hashlib.sha256(shown).hexdigest()
    if found != fingerprint:
        raise Refused(
            "fingerprint",
            f"the hub shows certificate {found[:16]}…, expected {fingerprint[:16]}…",
            hint="use the join code this hub prints now; if it should not have changed, "
            "somebody may be in between",
        )


def wrap_client(sock: socket.socket) -> ssl.SSLSocket:
    """The TLS handshake of a peer, within the socket's time-out. Closes the socket on failure."""
    try:
        secured = client_context().wrap_socket(sock, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    try:
        secured.do_handshake()
    except BaseException:
        secured.close()
        raise
    return secured
