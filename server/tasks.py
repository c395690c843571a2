"""Waiting and working in the background, inside one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Tasks:
    """Background tasks, and conditions that others wait for."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._running: set[asyncio.Task[None]] = set()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition that `notify` announces; False if time ran out first."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return condition()
        return True

    def notify(self) -> None:
        """Something may have changed that somebody waits for."""
        self.spawn(self._announce)

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def spawn(self, call: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run a coroutine beside everything else."""

        async def run() -> None:
            await call(*args)

        task = asyncio.get_running_loop().create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()


async def in_thread(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call in one of the pool's threads."""
    return await asyncio.get_running_loop().run_in_executor(pool, call, *args)
