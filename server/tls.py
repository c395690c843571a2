"""The server's side of TLS."""

from __future__ import annotations

import grpc

from fedreuse.proto.pem import check_authority, check_pair, read_pem
from fedreuse.server.settings import TlsSettings


def server_credentials(tls: TlsSettings | None) -> grpc.ServerCredentials | None:
    """What the server shows and demands; None without TLS. Raises TlsError."""
    if tls is None:
        return None
    certificate, key = read_pem(tls.certificate, "CERTIFICATE"), read_pem(tls.key, "PRIVATE KEY")
    check_pair(tls.certificate, tls.key)
    authority = None
    if tls.client_ca is not None:
        authority = read_pem(tls.client_ca, "CERTIFICATE")
        check_authority(tls.client_ca)
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=authority, require_client_auth=authority is not None
    )
