"""Who holds which examples: partitions over clients, validation splits, subsets. No torch is needed."""

from fedreuse.sim.partition.files import labels_hash, partition_hash, read_partition, write_partition
from fedreuse.sim.partition.rules import Partition, partition
from fedreuse.sim.partition.settings import (
    Indices,
    Labels,
    Owners,
    PartitionError,
    PartitionSettings,
    short_form,
)
from fedreuse.sim.partition.splits import (
    cut_validation,
    largest_remainder,
    refuse_single_example_clients,
    split_validation,
    stratified_subset,
    validation_size,
)

__all__ = [
    "Indices",
    "Labels",
    "Owners",
    "Partition",
    "PartitionError",
    "PartitionSettings",
    "cut_validation",
    "labels_hash",
    "largest_remainder",
    "partition",
    "partition_hash",
    "read_partition",
    "refuse_single_example_clients",
    "short_form",
    "split_validation",
    "stratified_subset",
    "validation_size",
    "write_partition",
]
