"""One self-contained HTML page about one or more runs: what they cost on every layer, and what they reached."""

from fedreuse.sim.report.page import write_report

__all__ = ["write_report"]
