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

    def close(self) -> None:
        pass


class ProcessPool:
    """`workers` processes; torch is imported once, in the server they are forked from."""

    def __init__(self, folder: Path, device: str, workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._executor = ProcessPoolExecutor(workers, context, worker.start, (folder, device))

    def submit(self, method: str, *arguments: object) -> Future[Any]:
        return self._executor.submit(worker.call, method, *arguments)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
