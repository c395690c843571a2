"""Methods as recipes of parts: each entry says which parts differ from the neutral ones, and with what.

Constants are the DG paper's (section 5.2): FedProx has its own mu, DG-FedReuse another.
"""

from __future__ import annotations

from typing import Any

_TOPK: dict[str, Any] = {"compressor": {"kind": "topk", "ratio": 0.2}}
_REUSE: dict[str, Any] = {
    "objective": {"kind": "proximal", "mu": 3.4156e-4},
    "memory": {"kind": "reuse"},
}
_PROX: dict[str, Any] = {"objective": {"kind": "proximal", "mu": 5e-4}}

RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": _PROX,
    "topk-fedavg": _TOPK,
    "topk-fedprox": _TOPK | _PROX,
    "dg-fedreuse": _TOPK | _REUSE | {"gate": {"kind": "score"}},
    # Reuse without sparsity: r = 1.
    "reuse-only": _REUSE | {"gate": {"kind": "score"}},
    # The control: the age limit and the quota decide, nobody is scored (D = 0).
    "age-only": _TOPK | _REUSE | {"gate": {"kind": "age"}},
    # Any other combination of parts; nothing is preset.
    "custom": {},
}

SUMMARIES = {
    "fedavg": "dense averaging",
    "fedprox": "dense, proximal objective",
    "topk-fedavg": "Top-K updates, no reuse",
    "topk-fedprox": "Top-K updates, proximal objective, no reuse",
    "dg-fedreuse": "Top-K updates, cached updates reused under the proxy-gradient gate",
    "reuse-only": "as dg-fedreuse with dense updates",
    "age-only": "as dg-fedreuse, but only age and quota decide (control)",
    "custom": "your own combination of parts",
}
