"""What can go wrong on the client's side; no torch needed to name it."""


class TaskError(Exception):
    """A task that cannot be found, loaded or used; the text says which, why and what to do."""


class AgentError(Exception):
    """This client cannot take part; the text says why and what to do."""
