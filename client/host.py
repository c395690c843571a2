"""One process's clients: one task, one model on one device, any number of identities, one at a time."""

from __future__ import annotations

import torch

from fedreuse.client.held import HeldStore
from fedreuse.client.participant import Participant
from fedreuse.client.task import Task
from fedreuse.client.workbench import Workbench


class ClientHost:
    """Participants of a process; they share the model and take turns.

    The `keep` that worked last stay at hand with their data (None: all); others are made again when needed.
    """

    def __init__(self, task: Task, device: torch.device, held: HeldStore, keep: int | None = None) -> None:
        self.held, self._keep = held, keep
        self._task = task
        self._bench = Workbench(task, device)
        self._participants: dict[int, Participant] = {}

    def participant(self, client: int) -> Participant:
        participant = self._participants.pop(client, None)
        if participant is None:
            participant = Participant(client, self._task, self._bench, self.held)
        self._participants[client] = participant  # the last is the newest
        if self._keep is not None and len(self._participants) > self._keep:
            del self._participants[next(iter(self._participants))]
        return participant


def be_deterministic() -> None:
    """One thread and deterministic kernels: what makes two bodies agree bit for bit."""
    torch.set_num_threads(1)
    # `use_deterministic_algorithms(True)` without the compiler, which that call imports: 1.5 s and 200 MB.
    torch.set_deterministic_debug_mode("error")
    # Fresh memory need not be filled: a kernel that read it before writing would be wrong in any case.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
