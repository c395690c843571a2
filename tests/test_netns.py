"""Segments and IP bytes of the ledgers against what a cable carried, as a capture and the kernel's filter saw it.

A ledger's sum is the state of a connection at its last reading, when its sender had sent exactly `segments` packets:
so the first that many packets of the capture must have exactly the ledger's bytes. What comes later (the goodbye) is
in no row, and the filter's counters have it.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
from federates import client, read_rows, server, total
from netns import SERVER, Cable, Capture, Flow, NotPermittedError, Packet, repeated

MSS, HEADER, SYN = 1448, 52, 8
"""MTU 1500 less 20 bytes IP, 20 TCP and 12 timestamps; a SYN has 8 bytes of options more."""
LAYERS = ("ip", "tcp_payload", "tcp_retransmitted", "segments", "pure_acks")
WAYS = ("up", "down")
Flows = dict[tuple[str, int], Flow]
Known = dict[tuple[str, str], int]


@contextmanager
def cable(**how):
    made = None
    try:
        made = Cable(**how)
        yield made
    except NotPermittedError as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        if made is not None:
            made.close()


async def federate(cable: Cable, folder: Path, clients: int = 1) -> Flows:
    """A federation over the cable; what was captured."""
    capture = await Capture.start(cable)
    try:
        where = {"settings": {"host": SERVER}, "within": cable.host("srv")}
        async with server(folder / "server", clients=clients, **where) as serving:
            address = await serving.hear("address")
            async with client(address, folder, *range(clients), within=cable.host("cl")) as taking:
                await taking.hear("done")
                await serving.hear("done")
        return await capture.stop()
    finally:
        await capture.kill()


def known(folder: Path, number: int) -> Known:
    """Sums of the server's ledger by direction and layer, "own" of the client's.

    Of the uplink the server has what the client reported; the client has read its counters once more.
    """
    rows = [row for row in read_rows(folder / "server" / "bytes.csv") if row["client"] == str(number)]
    own = read_rows(folder / f"client-{number}.csv")
    return {(way, layer): total(rows, way, layer) for way in WAYS for layer in LAYERS} | {
        ("own", layer): total(own, "up", layer) for layer in LAYERS
    }


def carried(packets: list[Packet]) -> dict[str, int]:
    """The layers of these packets. Blocks of selective acknowledgements are in the packets, but in no counter."""
    selective = sum(packet.options - (HEADER - 40) - SYN * packet.syn for packet in packets)
    return {
        "ip": sum(packet.length for packet in packets) - selective,
        "tcp_payload": sum(packet.payload for packet in packets),
        "tcp_retransmitted": repeated(packets),
        "segments": len(packets),
        "pure_acks": sum(1 for packet in packets if not packet.payload),
    }


def flow_of(figures: Known, flows: Flows, way: str) -> int:
    """The client's port of the one flow whose first packets are what the ledger says, in every layer."""
    wanted, direction = {layer: figures[way, layer] for layer in LAYERS}, "down" if way == "down" else "up"
    there = {port: flow.packets for (to, port), flow in flows.items() if to == direction}
    found = {port: carried(packets[: wanted["segments"]]) for port, packets in there.items()}
    (port,) = [port for port, layers in found.items() if layers == wanted] or pytest.fail(
        f"{wanted}: {found}"
    )
    return port


def assert_the_filter_saw_the_same(cable: Cable, flows: Flows) -> None:
    for host, way in (("srv", "up"), ("cl", "down")):
        packets = [packet for (to, _), flow in flows.items() if to == way for packet in flow.packets]
        assert cable.counted(host)["came"] == (len(packets), sum(packet.length for packet in packets))


async def test_packets_of_two_clients_are_those_of_their_ledgers(tmp_path):
    with cable() as there:
        flows = await federate(there, tmp_path, clients=2)
        assert_the_filter_saw_the_same(there, flows)
    ports = []
    for number in range(2):
        figures = known(tmp_path, number)
        port = flow_of(figures, flows, "up")
        assert flow_of(figures, flows, "own") == flow_of(figures, flows, "down") == port
        ports.append(port)
        for way in WAYS:
            # What came later, to the end of the connection, is a goodbye: no more than a few hundred bytes of it.
            late = flows[way, port].packets[figures[way, "segments"] :]
            assert sum(packet.payload for packet in late) < 500
    assert len(set(ports)) == len(flows) / 2 == 2


async def test_what_was_lost_is_what_was_sent_again(tmp_path):
    """Every 40th large packet to the server is dropped; the filter counts them."""
    with cable(drop="ip length > 1000 numgen inc mod 40 == 7") as there:
        flows = await federate(there, tmp_path)
        assert_the_filter_saw_the_same(there, flows)
        packets, size = there.counted("srv")["lost"]
    figures = known(tmp_path, 0)
    port = flow_of(figures, flows, "up")
    assert flow_of(figures, flows, "own") == flow_of(figures, flows, "down") == port
    sent = flows["up", port].packets
    large = [packet for packet in sent if packet.length > 1000]
    dropped = large[7::40]
    assert (len(dropped), sum(packet.length for packet in dropped)) == (packets, size)
    assert packets > 5
    # A byte is sent again because it was dropped, or for nothing: then it comes twice.
    gone = set(map(id, dropped))
    twice = repeated(packet for packet in sent if id(packet) not in gone)
    assert repeated(sent) == size - HEADER * packets + twice
    # The goodbye is too small to be dropped: all that was lost is in the ledger.
    assert figures["up", "tcp_retransmitted"] >= size - HEADER * packets


async def test_with_offloads_the_ledger_still_has_the_packets_of_the_wire(tmp_path):
    """The hosts hand each other packets of up to 64 kB, which a real device would cut to its MTU."""
    with cable(offloads=True) as there:
        flows = await federate(there, tmp_path)
        assert_the_filter_saw_the_same(there, flows)
    figures = known(tmp_path, 0)
    for way in WAYS:
        ((_, flow),) = [(key, flow) for key, flow in flows.items() if key[0] == way]
        segments, payload, captured = 0, 0, 0
        for packet in flow.packets:
            if segments == figures[way, "segments"]:
                break
            captured += 1
            segments += max(1, -(-packet.payload // MSS))
            payload += packet.payload
        assert segments == figures[way, "segments"]
        assert payload == figures[way, "tcp_payload"]
        assert payload + HEADER * segments + SYN == figures[way, "ip"]
        assert captured < segments
