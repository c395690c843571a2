"""Networks for benchmarks, in namespaces of their own: addresses, loss, rate, and a referee that counts packets.

Needs root, iproute2, ethtool and nft. Nothing outside the namespaces made here is touched, and they go at the end.
The referee is nft where a sender's packets enter the switch (or the loopback device), before any is dropped: TCP of
one port only, bytes from the IP header on, told apart by the length of the TCP header.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

PORT = 9310
WORDS = range(5, 16)
"""Lengths a TCP header can have, in words of 4 bytes; 8 with time stamps and nothing else."""
WAYS = ("up", "down")
_TOOLS = ("ip", "ss", "tc", "nft", "ethtool")


class NetworkError(Exception):
    """A network that cannot be had here; the text says why."""


@dataclass(frozen=True)
class Seen:
    """What the referee saw of one direction. `options` are bytes of TCP options beyond time stamps, without SYNs'."""

    packets: int
    ip: int
    payload: int
    pure_acks: int
    options: int
    bare: int
    """Packets without time stamps (RST)."""
    syn: int
    fin: int
    rst: int
    lost: int
    """Dropped at random in the switch."""
    queued_out: int
    """Dropped in the switch because its queue was full."""


@dataclass(frozen=True)
class Counted:
    """What the sender's kernel counted on all live connections of one direction (TCP_INFO, asked for by `ss`)."""

    connections: int
    sent: int
    segments: int


class Network:
    """A server and a client host; leave it to remove both. `address` is where the server listens."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}{os.getpid()}"
        self._stack = ExitStack()
        self.address = "127.0.0.1"
        self.server = self.client = self._switch = f"{self._prefix}-a"
        self._devices = {"up": "lo", "down": "lo"}

    def __enter__(self) -> Network:
        check()
        with ExitStack() as stack:
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self, stack: ExitStack) -> None:
        self._host(stack, self.server)
        self._rules(loss=0)

    def inside(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs a command on a host; it becomes that process, with the same number."""
        return ["ip", "netns", "exec", host, *command]

    def congestion_control(self) -> str:
        return _run(*self.inside(self.server, ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"])).strip()

    def seen(self) -> dict[str, Seen]:
        """What the referee saw so far."""
        listed = json.loads(_run(*self.inside(self._switch, ["nft", "-j", "list", "counters"])))
        counters = {
            item["counter"]["name"]: item["counter"] for item in listed["nftables"] if "counter" in item
        }
        return {way: self._sum(way, counters) for way in WAYS}

    def quiet(self) -> dict[str, dict[str, Any]] | None:
        """The referee's and the kernel's counters at one moment; None if packets moved meanwhile."""
        before = self.seen()
        counted = {"up": self._counted(self.client, "dport"), "down": self._counted(self.server, "sport")}
        if self.seen() != before:
            return None
        return {way: {"seen": asdict(before[way]), "kernel": asdict(counted[way])} for way in WAYS}

    def _counted(self, host: str, end: str) -> Counted:
        lines = _run(
            *self.inside(host, ["ss", "-tinHO", "state", "established", f"{end} = :{PORT}"])
        ).splitlines()
        fields = [dict(word.split(":", 1) for word in line.split() if ":" in word) for line in lines]
        sums = (sum(int(there.get(name, 0)) for there in fields) for name in ("bytes_sent", "segs_out"))
        return Counted(len(lines), *sums)

    def _sum(self, way: str, counters: dict[str, Any]) -> Seen:
        def packets(name: str) -> int:
            return int(counters[f"{way}_{name}"]["packets"])

        of = {words: packets(f"words{words}") for words in WORDS}
        ip = sum(int(counters[f"{way}_words{words}"]["bytes"]) for words in WORDS)
        syn = packets("syn")
        return Seen(
            packets=sum(of.values()),
            ip=ip,
            payload=ip - sum((20 + 4 * words) * n for words, n in of.items()),
            pure_acks=packets("empty"),
            options=sum(4 * (words - 8) * n for words, n in of.items() if words > 8) - 8 * syn,
            bare=sum(n for words, n in of.items() if words < 8),
            syn=syn,
            fin=packets("fin"),
            rst=packets("rst"),
            lost=packets("lost"),
            queued_out=self._full(way),
        )

    def _full(self, way: str) -> int:
        return 0

    def _host(self, stack: ExitStack, name: str) -> None:
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _rules(self, loss: float) -> None:
        lines = ["table netdev referee {"]
        names = [f"words{words}" for words in WORDS] + ["syn", "fin", "rst", "empty", "lost"]
        lines += [f"counter {way}_{name} {{ }}" for way in WAYS for name in names]
        for device in dict.fromkeys(self._devices.values()):
            lines += [
                f"chain on_{device.replace('-', '_')} {{",
                f'type filter hook ingress device "{device}" priority 0; policy accept;',
            ]
            for way, end in (("up", "dport"), ("down", "sport")):
                if self._devices[way] == device:
                    mine = f"tcp {end} {PORT}"
                    for words in WORDS:
                        lines.append(f"{mine} tcp doff {words} counter name {way}_words{words}")
                        lines.append(
                            f"{mine} tcp flags & (syn | fin | rst) == 0 tcp doff {words} "
                            f"ip length {20 + 4 * words} counter name {way}_empty"
                        )
                    lines += [
                        f"{mine} tcp flags & {flag} == {flag} counter name {way}_{flag}"
                        for flag in ("syn", "fin", "rst")
                    ]
                    if loss:
                        lines.append(
                            f"{mine} numgen random mod 10000 < {round(1e4 * loss)} "
                            f"counter name {way}_lost drop"
                        )
            lines.append("}")
        _run(*self.inside(self._switch, ["nft", "-f", "-"]), text="\n".join([*lines, "}"]) + "\n")


class Link(Network):
    """Two hosts on a switch that drops packets at random and lets through `rate` bits a second, both directions.

    Packets are real ones: no device on the way joins them or splits them. Loss and rate are the switch's business: a
    packet dropped in its sender's own queue counts as a failed send there, not as a lost packet.
    """

    QUEUE = 1_500_000
    """Bytes that may wait in the switch for each direction: a thousand full packets."""

    def __init__(self, prefix: str, rate: int, loss: float) -> None:
        super().__init__(prefix)
        self._rate, self._loss = rate, loss
        self.address = "10.99.0.1"
        self.server, self.client, self._switch = (f"{self._prefix}-{end}" for end in ("s", "c", "w"))
        self._devices = {"up": "to-client", "down": "to-server"}

    def _build(self, stack: ExitStack) -> None:
        self._host(stack, self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for n, (host, port) in enumerate(((self.server, "to-server"), (self.client, "to-client")), 1):
            self._host(stack, host)
            _run("ip", "-n", self._switch, *f"link add {port} type veth peer name eth0 netns {host}".split())
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "addr", "add", f"10.99.0.{n}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            for where, device in ((host, "eth0"), (self._switch, port)):
                off = [part for name in ("tso", "gso", "gro", "tx", "rx") for part in (name, "off")]
                _run(*self.inside(where, ["ethtool", "-K", device, *off]))
            shape = f"root tbf rate {self._rate} burst 32kb limit {self.QUEUE}"
            _run("tc", "-n", self._switch, "qdisc", "add", "dev", port, *shape.split())
        self._rules(self._loss)

    def _full(self, way: str) -> int:
        out = "to-server" if way == "up" else "to-client"
        told = json.loads(_run("tc", "-n", self._switch, "-s", "-j", "qdisc", "show", "dev", out))
        return sum(int(qdisc["drops"]) for qdisc in told if qdisc["kind"] == "tbf")


def check() -> None:
    """Raises NetworkError if networks cannot be made here."""
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NetworkError(f"not installed: {', '.join(lacking)} (packages iproute2, nftables, ethtool)")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root")


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def to_json(seen: dict[str, Seen]) -> dict[str, Any]:
    return {way: asdict(there) for way, there in seen.items()}


def from_json(told: dict[str, Any]) -> dict[str, Seen]:
    return {way: Seen(**there) for way, there in told.items()}
