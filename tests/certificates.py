"""Authorities and certificates for tests: good ones, and every kind of bad one."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme

from fedreuse.client.tls import ClientTls
from fedreuse.server.settings import TlsSettings

LONG_AGO = datetime.datetime(2001, 1, 1), datetime.datetime(2002, 1, 1)
FAR_AHEAD = datetime.datetime(2998, 1, 1), datetime.datetime(2999, 1, 1)


class Certificates:
    """PEM files in a folder: `ca` and `other` are authorities, the rest NAME.pem with NAME.key."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        ca, other = trustme.CA(), trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca.pem")
        other.cert_pem.write_to_path(folder / "other.pem")
        self._issue("server", ca, host)
        self._issue("elsewhere", ca, "elsewhere.example")
        self._issue("expired", ca, host, LONG_AGO)
        self._issue("future", ca, host, FAR_AHEAD)
        self._issue("client", ca, "client@fedreuse.example")
        self._issue("stranger", other, "client@fedreuse.example")

    def _issue(self, name: str, ca: trustme.CA, whom: str, times: tuple = (None, None)) -> None:
        issued = ca.issue_cert(whom, not_before=times[0], not_after=times[1])
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        (self.folder / f"{name}.pem").write_bytes(chain)
        issued.private_key_pem.write_to_path(self.folder / f"{name}.key")

    def server(self, name: str = "server", *, client_ca: bool = False) -> TlsSettings:
        pem, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        return TlsSettings(certificate=pem, key=key, client_ca=self.folder / "ca.pem" if client_ca else None)

    def client(self, name: str | None = None, ca: str = "ca") -> ClientTls:
        shown = (
            {}
            if name is None
            else {"certificate": self.folder / f"{name}.pem", "key": self.folder / f"{name}.key"}
        )
        return ClientTls(ca=self.folder / f"{ca}.pem", **shown)
