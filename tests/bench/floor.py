"""The floor: what a federated round costs with gRPC and numpy alone.

A client's call carries the whole changed model as raw float32 and returns, once everybody has called, with
the mean. No streams, no protobuf, no checks, nothing on disk.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock

import grpc
import numpy as np
from meter import Meter, meet, tell
from workload import CLIENTS, MODELS, arrays, change

from fedreuse.proto.allocator import keep_large_blocks

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Server:
    """Hands out the model when all have called; every later meeting of all calls closes a round."""

    def __init__(self, model: str, rounds: int) -> None:
        self.start = np.concatenate([array.ravel() for array in arrays(model).values()])
        self.model, self.left = self.start, rounds
        self.finished = Event()
        self.meter: Meter | None = None
        self._sum = np.zeros_like(self.model)
        self._reply = self.model.tobytes()
        self._lock = Lock()
        self._gathered = Barrier(CLIENTS, self._close_round)
        self._began = False

    def exchange(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        if request:
            with self._lock:
                self._sum += np.frombuffer(request, np.float32)
        self._gathered.wait()
        return self._reply

    def _close_round(self) -> None:
        if not self._began:
            self._began = True
            return
        assert self.meter is not None
        self.model = self._sum / np.float32(CLIENTS)
        self._sum = np.zeros_like(self.model)
        self.left -= 1
        self._reply = self.model.tobytes() if self.left else b""
        self.meter.mark(last=not self.left)
        if not self.left:
            self.finished.set()


def serve(model: str, rounds: int) -> None:
    floor = Server(model, rounds)
    server = grpc.server(ThreadPoolExecutor(CLIENTS), options=_OPTIONS)
    exchange = grpc.unary_unary_rpc_method_handler(floor.exchange)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Floor", {"Exchange": exchange}),))
    port = server.add_insecure_port("127.0.0.1:0")
    floor.meter = meet(f"127.0.0.1:{port}")
    server.start()
    floor.finished.wait()
    server.stop(5).wait()
    moved = float(np.mean(floor.model - floor.start, dtype=np.float64))
    tell({**floor.meter.results(), "moved": moved})


def take_part(address: str, client: int) -> None:
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        exchange = channel.unary_unary("/Floor/Exchange")
        model = exchange(b"", wait_for_ready=True)
        while model:
            update = np.frombuffer(model, np.float32) + change(client)
            model = exchange(update.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("server", "client"))
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--address")
    parser.add_argument("--client", type=int)
    parser.add_argument("--keep-large-blocks", action="store_true")
    arguments = parser.parse_args()
    if arguments.keep_large_blocks:
        keep_large_blocks()
    if arguments.role == "server":
        serve(arguments.model, arguments.rounds)
    else:
        take_part(arguments.address, arguments.client)


if __name__ == "__main__":
    main()
