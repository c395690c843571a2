"""One process's clients: one task, one model on one device, any number of identities, one at a time."""

from __future__ import annotations

import torch

from fedreuse.client.held import HeldStore
from fedreuse.client.participant import Participant
from fedreuse.client.task import Task
from fedreuse.client.workbench import Workbench


class ClientHost:
    """Participants of a process; they share the model and take turns."""

    def __init__(self, task: Task, device: torch.device, held: HeldStore) -> None:
        self.held = held
        self._task = task
        self._bench = Workbench(task, device)
        self._participants: dict[int, Participant] = {}

    def participant(self, client: int) -> Participant:
        if client not in self._participants:
            self._participants[client] = Participant(client, self._task, self._bench, self.held)
        return self._participants[client]


def be_deterministic() -> None:
    """One thread and deterministic kernels: what makes two bodies agree bit for bit."""
    torch.set_num_threads(1)
    # `use_deterministic_algorithms(True)` without the compiler, which that call imports: 1.5 s and 200 MB.
    torch.set_deterministic_debug_mode("error")
    # Fresh memory need not be filled: a kernel that read it before writing would be wrong in any case.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
