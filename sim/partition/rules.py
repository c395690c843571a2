"""Who holds which examples: one short function for each kind of partition, all drawing from the named stream.

Sources: NIID-Bench (Li et al., 2022) for the Dirichlet partition with its balance step, label quantity ("#label = C")
and quantity skew; McMahan et al. (2017) for shards. All index arrays are int64 and ascending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedreuse.proto.streams import Purpose, stream
from fedreuse.sim.partition.settings import Indices, Labels, Owners, PartitionError, PartitionSettings

MAXIMUM_REDRAWS = 1000

Counts = NDArray[np.int64]
"""Examples by label and client, shape (labels, clients)."""

logger = logging.getLogger(__name__)


class Partition(NamedTuple):
    """parts: each client's examples; redraws: draws given up since a client held too little.

    remarks: what somebody who reads the result should know, e.g. which examples nobody holds.
    """

    parts: list[Indices]
    redraws: int = 0
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ground:
    """What a rule works on: labels (n,) and owners (n,) if there are any, and the stream to draw from."""

    labels: Labels
    owners: Owners | None
    clients: int
    settings: PartitionSettings
    minimum: int
    generator: np.random.Generator

    @cached_property
    def values(self) -> Labels:
        """Different labels, ascending: class loops run over them."""
        return np.unique(self.labels)

    @cached_property
    def members(self) -> list[Indices]:
        """The examples of each label."""
        return [np.flatnonzero(self.labels == value) for value in self.values]


def partition(
    labels: Labels, clients: int, settings: PartitionSettings, seed: int, owners: Owners | None = None
) -> Partition:
    """Divide examples over clients: disjoint, with at least the minimum of examples for everybody.

    labels: shape (n,), any integers; seed: root of the named streams; owners: shape (n,), natural ids.
    Whatever is drawn and decides sizes is redrawn, all of it, while the smallest client is below the minimum;
    shuffles do not change sizes and are drawn once.
    Raises PartitionError if the minimum cannot be, or is not, reached.
    """
    count, minimum = len(labels), settings.minimum_size
    if clients < 1 or count < 1:
        raise PartitionError(f"{count} examples cannot be divided over {clients} clients")
    if minimum is None:
        minimum = 10 if count >= 60 * clients and settings.kind != "natural" else 2
    if count < minimum * clients and settings.kind != "natural":
        lower = ", more examples or a smaller partition.minimum_size" if minimum > 2 else " or more examples"
        raise PartitionError(
            f"{count} examples cannot give each of {clients} clients at least {minimum}: use fewer clients{lower}"
        )
    generator = stream(seed, Purpose.PARTITION)
    result = RULES[settings.kind](Ground(labels, owners, clients, settings, minimum, generator))
    logger.info("%s partition over %d clients after %d redraws", settings.kind, clients, result.redraws)
    return result


# ---------------------------------------------------------------- rules


def _iid(ground: Ground) -> Partition:
    """A random permutation, cut into parts whose sizes differ by one at most."""
    shuffled = ground.generator.permutation(len(ground.labels))
    return Partition([np.sort(part) for part in np.array_split(shuffled, ground.clients)])


def _iid_balanced(ground: Ground) -> Partition:
    """Each label's shuffled examples are dealt one by one to the clients in turn, label after label.

    Neither the examples of a label nor all examples of two clients differ by more than one in number.
    """
    deck = np.concatenate([ground.generator.permutation(own) for own in ground.members])
    return Partition([np.sort(deck[client :: ground.clients]) for client in range(ground.clients)])


def _half_iid(ground: Ground) -> Partition:
    """A share `similarity` of the examples, drawn at random, is divided as IID; the rest by labels.

    As `_label_quantity`, but a client may get nothing of a label of which too little is left.
    """
    shuffled = ground.generator.permutation(len(ground.labels))
    alike = round(Fraction(str(ground.settings.similarity)) * len(shuffled))
    iid = np.array_split(shuffled[:alike], ground.clients)
    rest = shuffled[alike:]
    members = [rest[ground.labels[rest] == value] for value in ground.values]
    per_client = _labels_per_client(ground)

    def draw() -> Counts:
        return _shared_equally([len(own) for own in members], _holders(ground, per_client))

    counts, redraws = _redraw(
        ground,
        draw,
        advice="use fewer clients or raise partition.similarity",
        fixed=np.array([len(part) for part in iid]),
    )
    parts = [np.sort(np.concatenate(both)) for both in zip(iid, _cut(members, counts), strict=True)]
    return Partition(parts, redraws, _unheld(ground, members, counts))


def _dirichlet(ground: Ground) -> Partition:
    """For each label in ascending order v ~ Dir(α·1_N), and its shuffled examples are cut at the sums of v.

    v_j = 0 for clients that already hold at least n/N examples.
    """
    alpha = ground.settings.alpha
    counts, redraws = _redraw(
        ground,
        lambda: _dirichlet_counts(ground),
        advice="raise partition.alpha or use fewer clients",
        what=f" with alpha {alpha:g}",
    )
    return Partition([np.sort(part) for part in _cut(_shuffled(ground), counts)], redraws)


def _dirichlet_counts(ground: Ground) -> Counts:
    """One draw of all labels' shares. A draw in which no share is left is all zeros."""
    clients, alpha, total = ground.clients, ground.settings.alpha, len(ground.labels)
    counts = np.zeros((len(ground.members), clients), np.int64)
    for k, own in enumerate(ground.members):
        v = ground.generator.dirichlet(np.full(clients, alpha))
        v[counts.sum(axis=0) * clients >= total] = 0
        counts[k] = _proportional(v, len(own))
        if not counts[k].any():  # a small alpha underflows: only full clients had a share
            return np.zeros_like(counts)
    return counts


def _label_quantity(ground: Ground) -> Partition:
    """Client i holds label i mod K and C - 1 other labels at random; who holds a label shares it equally.

    Every client has exactly C labels. A label that nobody holds (if N·C < K, or by chance) is left out.
    """
    per_client = _labels_per_client(ground)
    sizes = [len(own) for own in ground.members]

    def draw() -> Counts:
        held = _holders(ground, per_client)
        counts = _shared_equally(sizes, held)
        return np.where((counts[held] > 0).all(), counts, 0)

    rare = int(np.argmin(sizes))
    counts, redraws = _redraw(
        ground,
        draw,
        advice="use fewer clients or another partition.labels "
        f"(label {ground.values[rare]} has {sizes[rare]} examples for all who hold it)",
        what=f" with {per_client} of {len(sizes)} labels a client",
        random=1 < per_client < len(sizes),
    )
    remarks = list(_unheld(ground, ground.members, counts))
    holders = (counts > 0).sum(axis=1)
    if per_client == 1 and len(set(holders[holders > 0].tolist())) > 1:
        remarks.append(
            f"{ground.clients} clients are no multiple of {len(sizes)} labels, so labels are shared by "
            f"{holders[holders > 0].min()} or {holders.max()} clients and sizes differ"
        )
    return Partition([np.sort(part) for part in _cut(_shuffled(ground), counts)], redraws, tuple(remarks))


def _shards(ground: Ground) -> Partition:
    """Sorted by label, cut into N·C shards of floor(n / (N·C)) examples, and C shards dealt to each client.

    The n mod N·C examples that fill no shard are left out, chosen at random before sorting. A client has about C
    labels; more where shards reach over the border between two labels.
    """
    clients, each, count = ground.clients, ground.settings.labels, len(ground.labels)
    size, left = divmod(count, clients * each)
    if each * size < ground.minimum:
        raise PartitionError(
            f"shards partition: {count} examples make {clients * each} shards of {size}, so each of {clients} "
            f"clients holds {each * size} examples, {ground.minimum} are asked for; lower partition.labels, "
            "use fewer clients or more examples"
        )
    kept = np.sort(ground.generator.permutation(count)[left:])
    shards = kept[np.argsort(ground.labels[kept], kind="stable")].reshape(clients * each, size)
    dealt = ground.generator.permutation(clients * each).reshape(clients, each)
    remark = f"{left} examples are left out: they fill none of {clients * each} shards of {size}"
    return Partition([np.sort(shards[own].ravel()) for own in dealt], 0, (remark,) if left else ())


def _quantity(ground: Ground) -> Partition:
    """A random permutation, cut into parts of sizes proportional to v ~ Dir(β·1_N)."""
    beta, count = ground.settings.beta, len(ground.labels)

    def draw() -> Counts:
        v = ground.generator.dirichlet(np.full(ground.clients, beta))
        return _proportional(v, count)[None]

    counts, redraws = _redraw(
        ground,
        draw,
        advice="raise partition.beta or use fewer clients",
        what=f" with beta {beta:g}",
    )
    shuffled = ground.generator.permutation(count)
    return Partition([np.sort(part) for part in _cut([shuffled], counts)], redraws)


def _natural(ground: Ground) -> Partition:
    """A client is one owner with at least the minimum of examples, 2 by default; sizes stay as they are.

    Of more owners than clients a random selection takes part. Clients are in ascending order of ids.
    """
    if ground.owners is None:
        raise PartitionError(
            "partition.kind natural: this task's examples have no natural owners; choose another kind"
        )
    _, inverse, counts = np.unique(ground.owners, return_inverse=True, return_counts=True)
    large = np.flatnonzero(counts >= ground.minimum)
    if len(large) < ground.clients:
        raise PartitionError(
            f"partition.kind natural: {len(large)} of {len(counts)} natural owners hold at least "
            f"{ground.minimum} examples, too few for {ground.clients} clients: "
            f"lower clients.total to {len(large)} or less"
        )
    chosen = np.sort(ground.generator.choice(large, ground.clients, replace=False))
    by_owner = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    left = len(counts) - len(chosen)
    remark = f"{left} of {len(counts)} natural owners take no part, with {len(inverse) - counts[chosen].sum()} examples"
    return Partition([by_owner[owner] for owner in chosen], 0, (remark,) if left else ())


RULES: dict[str, Callable[[Ground], Partition]] = {
    "iid": _iid,
    "iid-balanced": _iid_balanced,
    "half-iid": _half_iid,
    "dirichlet": _dirichlet,
    "lq": _label_quantity,
    "shards": _shards,
    "quantity": _quantity,
    "natural": _natural,
}
"""Kinds in which every example has one holder at most."""


# ---------------------------------------------------------------- pieces of rules


def _redraw(
    ground: Ground,
    draw: Callable[[], Counts],
    *,
    advice: str,
    what: str = "",
    fixed: Counts | int = 0,
    random: bool = True,
) -> tuple[Counts, int]:
    """Draw until every client has the minimum with the `fixed` examples it has already; with how many redraws."""
    largest = 0
    most = MAXIMUM_REDRAWS if random else 0
    for redraws in range(1 + most):
        counts = draw()
        smallest = int((counts.sum(axis=0) + fixed).min())
        if smallest >= ground.minimum:
            return counts, redraws
        largest = max(largest, smallest)
    tried = f"after {most} redraws the smallest client held {largest} examples at best"
    once = f"the smallest client would hold {largest} examples"
    smaller = f"lower partition.minimum_size to {largest}, " if largest >= 2 else ""
    raise PartitionError(
        f"{ground.settings.kind} partition{what} over {ground.clients} clients: {tried if random else once}, "
        f"{ground.minimum} are asked for; {smaller}{advice}"
    )


def _proportional(v: NDArray[np.float64], size: int) -> Counts:
    """Cut `size` examples at the cumulative sums of the shares v; nothing for anybody where all shares are zero."""
    cumulative = np.cumsum(v)
    if not cumulative[-1] > 0:
        return np.zeros(len(v), np.int64)
    # Dividing after the sum makes the last bound exactly 1, so that a share of nothing gets nothing by rounding.
    bounds: Counts = np.floor(cumulative / cumulative[-1] * size).astype(np.int64)
    return np.diff(bounds, prepend=0)


def _labels_per_client(ground: Ground) -> int:
    """C. Raises PartitionError if there are fewer labels."""
    wanted, there = ground.settings.labels, len(ground.values)
    if wanted > there:
        raise PartitionError(
            f"{ground.settings.kind} partition: a client cannot hold {wanted} different labels, the examples have "
            f"{there}; lower partition.labels"
        )
    return wanted


def _holders(ground: Ground, per_client: int) -> NDArray[np.bool_]:
    """Who holds which labels, (labels, clients): client i label i mod K and others at random."""
    kinds, clients = len(ground.values), np.arange(ground.clients)
    keys = ground.generator.random((ground.clients, kinds))
    keys[clients, clients % kinds] = -1  # first of all
    held = np.zeros((kinds, ground.clients), bool)
    held[np.argsort(keys, axis=1)[:, :per_client].T, clients] = True
    return held


def _shared_equally(sizes: Sequence[int], held: NDArray[np.bool_]) -> Counts:
    """Each label's examples in as many equal parts as clients hold it; the first parts may have one more."""
    counts = np.zeros(held.shape, np.int64)
    for k, size in enumerate(sizes):
        holders = np.flatnonzero(held[k])
        if len(holders):
            share, more = divmod(size, len(holders))
            counts[k, holders] = share + (np.arange(len(holders)) < more)
    return counts


def _shuffled(ground: Ground) -> list[Indices]:
    return [ground.generator.permutation(own) for own in ground.members]


def _cut(members: Sequence[Indices], counts: Counts) -> list[Indices]:
    """Each client's examples: of every label as many as `counts` says, in order; what is beyond is left out."""
    shares = [np.split(own, np.cumsum(row)) for own, row in zip(members, counts, strict=True)]
    return [np.concatenate(part) for part in list(zip(*shares, strict=True))[:-1]]


def _unheld(ground: Ground, members: Sequence[Indices], counts: Counts) -> tuple[str, ...]:
    """A remark on labels whose examples nobody got."""
    left = [k for k, own in enumerate(members) if len(own) and not counts[k].any()]
    if not left:
        return ()
    named = ", ".join(str(ground.values[k]) for k in left[:10]) + (", ..." if len(left) > 10 else "")
    count = sum(len(members[k]) for k in left)
    return (f"no client holds label {named}, and {count} examples are left out",)
