"""Where virtual clients compute: in this process, or in worker processes of one thread each."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from fedreuse.sim import worker

PRELOADED = ["fedreuse.sim.worker"]


class Pool(Protocol):
    def submit(self, method: str, *arguments: object) -> Future[Any]: ...

    def settle(self) -> None:
        """Nothing more will be submitted before a result is there."""

    def close(self) -> None: ...


class InlinePool:
    """Everything at once, in this process, when it is submitted."""

    def __init__(self, host: worker.Worker) -> None:
        self._host = host

    def submit(self, method: str, *arguments: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(self._host, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - the future carries it to the caller, as a process would
            future.set_exception(error)
        return future

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class TogetherPool(InlinePool):
    """As `InlinePool`, but trainings wait for each other: up to `size` clients learn at once."""

    def __init__(self, host: worker.Worker, size: int) -> None:
        super().__init__(host)
        self._size = size
        self._waiting: list[tuple[Future[Any], str, Any]] = []

    def submit(self, method: str, *arguments: object) -> Future[Any]:
        if method not in ("learn", "train"):
            return super().submit(method, *arguments)
        future: Future[Any] = Future()
        self._waiting.append((future, method, arguments))
        return future

    def settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for part in (waiting[at : at + self._size] for at in range(0, len(waiting), self._size)):
            _, method, (run, _, round) = part[0]
            clients = [client for _, _, (_, client, _) in part]
            results: list[Any]
            try:
                results = self._host.together(method, run, clients, round)
            except Exception as error:  # noqa: BLE001 - as in `InlinePool`
                results = [error] * len(part)
            for (future, *_), result in zip(part, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)


class ProcessPool:
    """`workers` processes; torch is imported once, in the server they are forked from."""

    def __init__(self, folder: Path, device: str, workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._executor = ProcessPoolExecutor(workers, context, worker.start, (folder, device))

    def submit(self, method: str, *arguments: object) -> Future[Any]:
        return self._executor.submit(worker.call, method, *arguments)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
