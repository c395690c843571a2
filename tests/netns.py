"""Two hosts on one cable, in network namespaces of their own, with the kernel's filter and a capture as meters.

Everything lives inside a mount and network namespace that one process holds; it ends when its standard input is
closed, by us or because we died, and the kernel takes the rest away. `python netns.py DEVICE` is the capture.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from shutil import which

SERVER, CLIENTS = "10.88.0.1", "10.88.0.2"
TOOLS = ("unshare", "nsenter", "ip", "nft", "ethtool")
OFFLOADS = ("tso", "gso", "gro", "tx", "rx")
WAYS = (("-nm",), ("-Urnm",))
"""As root; and as anybody, in a user namespace."""
HOLD = "mount -t tmpfs none /run && mkdir /run/netns && echo ready && exec cat"


class NotPermittedError(Exception):
    """Why there are no namespaces here."""


class Cable:
    """Hosts `srv` and `cl`, each with a device eth0, joined by a veth pair with an MTU of 1500.

    TCP is counted as it comes in at either host. `drop` are conditions on what is lost on its way to the server: in
    the receiver's ingress, as a sender that drops its own packets knows of it.
    """

    def __init__(self, *, offloads: bool = False, drop: str = "") -> None:
        missing = [tool for tool in TOOLS if which(tool) is None]
        if missing:
            raise NotPermittedError(f"not installed: {', '.join(missing)}")
        reasons = []
        for way in WAYS:
            self._holder = subprocess.Popen(
                ["unshare", *way, "sh", "-c", HOLD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert self._holder.stdout is not None
            user = ["-U", "--preserve-credentials"] if "U" in way[0] else []
            self._inside = ("nsenter", *user, "-m", "-n", "-t", str(self._holder.pid))
            try:
                if self._holder.stdout.readline() != "ready\n":
                    raise NotPermittedError(self._holder.communicate()[1].strip())
                self._build(offloads, drop)
                return
            except NotPermittedError as error:
                self.close()
                reasons.append(f"unshare {way[0]}: {error}")
        raise NotPermittedError("; ".join(reasons))

    def _build(self, offloads: bool, drop: str) -> None:
        for host in ("srv", "cl"):
            self._run("ip", "netns", "add", host)
        self._run(
            "ip", "link", "add", "eth0", "netns", "srv", "type", "veth", "peer", "name", "eth0", "netns", "cl"
        )
        for host, address in (("srv", SERVER), ("cl", CLIENTS)):
            self._run("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            self._run("ip", "-n", host, "link", "set", "lo", "up")
            self._run("ip", "-n", host, "link", "set", "eth0", "up")
            if not offloads:
                off = [word for name in OFFLOADS for word in (name, "off")]
                self._run("ip", "netns", "exec", host, "ethtool", "-K", "eth0", *off)
        self._count("srv", drop)
        self._count("cl", "")

    def _run(self, *command: str, given: str | None = None) -> str:
        done = subprocess.run([*self._inside, *command], input=given, capture_output=True, text=True)
        if done.returncode:
            raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def host(self, name: str) -> tuple[str, ...]:
        """What runs a command on a host."""
        return (*self._inside, "ip", "netns", "exec", name)

    def _count(self, host: str, drop: str) -> None:
        lost = f"ip protocol tcp {drop} counter name lost drop" if drop else ""
        table = f"""table netdev cable {{
            counter came {{ }}
            counter lost {{ }}
            chain incoming {{
                type filter hook ingress device "eth0" priority 0; policy accept;
                ip protocol tcp counter name came
                {lost}
            }}
        }}
        """
        self._run("ip", "netns", "exec", host, "nft", "-f", "-", given=table)

    def counted(self, host: str) -> dict[str, tuple[int, int]]:
        """Packets and IP bytes by counter, as they came in at a host."""
        listed = json.loads(self._run("ip", "netns", "exec", host, "nft", "-j", "list", "counters"))[
            "nftables"
        ]
        counters = [entry["counter"] for entry in listed if "counter" in entry]
        return {counter["name"]: (counter["packets"], counter["bytes"]) for counter in counters}

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(5)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        for pipe in (self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()


# ---------------------------------------------------------------- capture


@dataclass(frozen=True)
class Packet:
    """`options` are the bytes of TCP options, `length` all of the IP packet."""

    length: int
    payload: int
    options: int
    sequence: int
    syn: bool


@dataclass
class Flow:
    """What one host sent over one connection, in order."""

    packets: list[Packet] = field(default_factory=list)

    def again(self, count: int | None = None) -> int:
        """Payload bytes among the first `count` packets that had been sent before."""
        return repeated(self.packets[:count])


def repeated(packets: Iterable[Packet]) -> int:
    """Payload bytes that stood in an earlier one of the packets, too; byte by byte: slow, and plainly right."""
    seen: set[int] = set()
    found = 0
    for packet in packets:
        places = set(range(packet.sequence, packet.sequence + packet.payload))
        found += len(places & seen)
        seen |= places
    return found


class Capture:
    """What passed the server's device, dropped afterwards or not."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, cable: Cable) -> Capture:
        command = (*cable.host("srv"), sys.executable, __file__, "eth0")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 20) == b"ready\n"
        return cls(process)

    async def stop(self) -> dict[tuple[str, int], Flow]:
        """Flows by direction and the client's port."""
        out, _ = await asyncio.wait_for(self._process.communicate(b"\n"), 20)
        heard = json.loads(out)
        if heard["dropped"]:
            raise NotPermittedError(f"the capture lost {heard['dropped']} packets in its small buffer")
        flows: dict[tuple[str, int], Flow] = {}
        for way, port, *packet in heard["packets"]:
            flows.setdefault((way, port), Flow()).packets.append(Packet(*packet))
        return flows

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _capture(device: str) -> None:
    """Until standard input says something; then everything in one line."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
    for option in (
        socket.SO_RCVBUF,
        33,
    ):  # 33 is SO_RCVBUFFORCE, which not even root of a user namespace may use
        with suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 26)
    sock.bind((device, 0x0003))
    sock.settimeout(0.2)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    packets = []
    while True:
        try:
            data, (_, protocol, *_) = sock.recvfrom(256)
        except TimeoutError:
            if over.is_set():
                break
            continue
        if protocol != 0x0800 or data[9] != 6:
            continue
        length, tcp = struct.unpack_from("!H", data, 2)[0], (data[0] & 15) * 4
        source, target, sequence = struct.unpack_from("!HHI", data, tcp)
        header, flags = (data[tcp + 12] >> 4) * 4, data[tcp + 13]
        up = socket.inet_ntoa(data[12:16]) == CLIENTS
        port, payload = (source if up else target), length - tcp - header
        packets.append(
            ("up" if up else "down", port, length, payload, header - 20, sequence, bool(flags & 2))
        )
    _, dropped = struct.unpack("II", sock.getsockopt(263, 6, 8))  # PACKET_STATISTICS
    sys.stdout.write(json.dumps({"packets": packets, "dropped": dropped}) + "\n")


if __name__ == "__main__":
    _capture(sys.argv[1])
