"""Certificates and keys from PEM files, with errors that say what is wrong with which file."""

from __future__ import annotations

import ssl
from pathlib import Path


class TlsError(Exception):
    """A certificate or key that cannot be used; the text names the file and what to do."""


def read_pem(path: Path, what: str) -> bytes:
    """The content of a PEM file that holds a `what` ("CERTIFICATE" or "PRIVATE KEY"). Raises TlsError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path} cannot be read: {error.strerror}") from None
    if f"{what}-----".encode() not in content or b"-----BEGIN" not in content:
        raise TlsError(f"{path} holds no {what.lower()} in PEM form (-----BEGIN ... {what}-----)")
    return content


def check_pair(certificate: Path, key: Path) -> None:
    """Raises TlsError unless the key belongs to the certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"{key} is not the key of {certificate}, or one of them is damaged: {error}") from None


def check_authority(path: Path) -> None:
    """Raises TlsError unless the file holds certificates that others can be checked against."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise TlsError(f"{path} holds no usable certificate: {error}") from None
