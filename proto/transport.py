"""How the two sides meet: method names and channel options, the same numbers on both ends."""

from __future__ import annotations

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.frames import MAX_FRAME_BYTES

SERVICE: str = pb.DESCRIPTOR.services_by_name["Federation"].full_name
SESSION = f"/{SERVICE}/Session"
STATUS = f"/{SERVICE}/Status"

PATIENCE = 3
"""Heartbeats a peer may miss before it is taken for lost."""

MESSAGE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
]
SERVER_OPTIONS = [
    *MESSAGE_OPTIONS,
    # Refuse to share a port silently with another server.
    ("grpc.so_reuseport", 0),
    # Liveness is our own heartbeats' business; tolerate any client's HTTP/2 pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 100_000),
]
CLIENT_OPTIONS = [
    *MESSAGE_OPTIONS,
    # One HTTP/2 connection per client, also for several clients of one process: bytes stay attributable.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnecting is the agent's business.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Not a pause, whatever its name: how long one attempt may take. TCP sends a lost SYN again after a second, and
    # with TLS an attempt takes four times the way there and back.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
