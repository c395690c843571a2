"""The client's side of TLS."""

from __future__ import annotations

from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict

from fedreuse.proto.pem import TlsError, check_authority, check_pair, read_pem


class ClientTls(BaseModel):
    """PEM files: whom to trust, and what to show to a server that asks who the client is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: Path
    certificate: Path | None = None
    key: Path | None = None


def client_credentials(tls: ClientTls | None) -> grpc.ChannelCredentials | None:
    """None without TLS. Raises TlsError."""
    if tls is None:
        return None
    if (tls.certificate is None) != (tls.key is None):
        raise TlsError("a client certificate needs its key, and a key its certificate")
    authority, certificate, key = read_pem(tls.ca, "CERTIFICATE"), None, None
    check_authority(tls.ca)
    if tls.certificate is not None and tls.key is not None:
        certificate, key = read_pem(tls.certificate, "CERTIFICATE"), read_pem(tls.key, "PRIVATE KEY")
        check_pair(tls.certificate, tls.key)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def open_channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    """A blocking channel, for asking a server how far it is. Raises TlsError."""
    credentials = client_credentials(tls)
    return (
        grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    )


def hint(reason: str, encrypted: bool) -> str:
    """What is probably wrong if a connection failed for `reason`; empty if nothing comes to mind."""
    text = reason.lower()
    broken = any(word in text for word in ("settings", "socket closed", "reset", "eof"))
    if encrypted and "wrong_version_number" in text:
        return "the server does not speak TLS; leave --tls-ca out"
    if encrypted and ("expired" in text or "not yet valid" in text):
        return (
            "the server's certificate is not valid at this time; it needs a new one, unless a clock is wrong"
        )
    if encrypted and ("certificate" in text or "hostname" in text):
        return "the server's certificate is not signed by the authority in --tls-ca, or is for another name"
    if encrypted and broken:
        return (
            "the server may demand a certificate of this client, signed by its tls.client_ca; "
            "show one with --tls-certificate FILE --tls-key FILE"
        )
    if broken:
        return "the server may speak TLS only; name its authority with --tls-ca FILE"
    return ""
