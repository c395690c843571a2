"""The partition of a run: saved and hashed when it begins, read when it goes on, the same for every method."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.proto.streams import cohort
from fedreuse.server.store import RunError
from fedreuse.sim.config import RunConfig, load_config
from fedreuse.sim.partition import PartitionError, rules
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.simulate import simulate
from fedreuse.sim.tasks.division import Division, divide

SMALL = ("task=digits", "rounds=2", "clients.total=5", "clients.per_round=2", "sim.workers=1")
LABELS = np.arange(90) % 3


def config_of(output: Path, *overrides: str) -> RunConfig:
    return load_config(None, [*SMALL, f"output={output}", *overrides])


def begun(output: Path, *overrides: str) -> Path:
    config = config_of(output, *overrides)
    return create_run(config, make_task(config))


def environment(folder: Path) -> dict[str, str]:
    return json.loads((folder / "environment.json").read_text())


def saved(folder: Path, clients: int = 4, **options: object) -> tuple[Path, Division]:
    division = divide(LABELS, TaskContext(1, clients, Path(), {"partition": "dirichlet-2", **options}))
    division.save(folder / "partition.npz")
    return folder / "partition.npz", division


def read(path: Path, labels: np.ndarray = LABELS, clients: int = 4, **options: object) -> Division:
    return divide(labels, TaskContext(1, clients, Path(), {"partition": "dirichlet-2", **options}, path))


# What is saved


def test_a_run_saves_who_has_which_examples_with_their_hash(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "task.train_limit=200")
    division = make_task(config_of(tmp_path, "task.train_limit=200")).division
    with np.load(folder / "partition.npz", allow_pickle=False) as file:
        sizes, indices, rule = file["sizes"].tolist(), file["indices"].tolist(), json.loads(str(file["rule"]))
    assert sizes == [len(division.examples(client)) for client in range(5)]
    assert (
        indices == np.concatenate([division.used[division.examples(client)] for client in range(5)]).tolist()
    )
    packed, at = b"", 0
    for size in sizes:
        packed += struct.pack(f"<{size + 1}q", size, *indices[at : at + size])
        at += size
    digest = hashlib.sha256(packed).hexdigest()
    assert environment(folder)["partition_sha256"] == rule["sha256"] == digest
    assert (rule["kind"], rule["alpha"], rule["seed"], rule["clients"], rule["examples"]) == (
        ("dirichlet", 0.5, 101, 5, 1437)
    )


def test_sixty_thousand_examples_take_a_few_bytes_each(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    divide(labels, TaskContext(1, 500, Path(), {"partition": "lq-2"})).save(tmp_path / "partition.npz")
    assert (tmp_path / "partition.npz").stat().st_size < 60_000 * 4


def test_a_resampling_saves_its_rule_alone(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "partition=resample", "clients.total=100000")
    with np.load(folder / "partition.npz", allow_pickle=False) as file:
        assert file.files == ["rule"]
        rule = json.loads(str(file["rule"]))
    assert (rule["kind"], rule["size"], rule["clients"]) == ("resample", 20, 100_000)
    assert rule["sha256"] == environment(folder)["partition_sha256"]
    assert (folder / "partition.npz").stat().st_size < 2000
    make_task(config_of(tmp_path, "partition=resample", "clients.total=100000"), folder)


def test_every_method_of_a_seed_has_one_partition_and_one_schedule(tmp_path: Path) -> None:
    methods = ("topk-fedavg", "dg-fedreuse", "age-only")
    folders = [begun(tmp_path / method, f"method={method}") for method in methods]
    assert len({(f / "partition.npz").read_bytes() for f in folders}) == 1
    for key in ("partition_sha256", "schedule_sha256"):
        assert len({environment(f)[key] for f in folders}) == 1
    other = begun(tmp_path / "other", "seed=202")
    for key in ("partition_sha256", "schedule_sha256"):
        assert environment(other)[key] != environment(folders[0])[key]


def test_the_schedules_hash_is_of_the_clients_selected(tmp_path: Path) -> None:
    packed = b"".join(struct.pack("<2q", *cohort(101, round, 5, 2)) for round in (0, 1))
    found = environment(begun(tmp_path / "run"))["schedule_sha256"]
    assert found == hashlib.sha256(packed).hexdigest()


def test_a_task_without_a_division_saves_none(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "task=support:Line")
    assert not (folder / "partition.npz").exists()
    assert environment(folder)["partition_sha256"] is None
    make_task(config_of(tmp_path, "task=support:Line"), folder)


def test_remarks_are_told_when_a_run_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path / "run", "partition=lq-1")
    assert "lq partition: no client holds label 5, 6, 7, 8, 9" in caplog.text


# Going on


def test_a_run_goes_on_with_what_it_saved_and_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "run")
    config = config_of(tmp_path)
    drawn = make_task(config).division

    def never(*_arguments: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setitem(rules.RULES, "dirichlet", never)
    found = make_task(config, folder).division
    assert found.hash() == drawn.hash()
    for client in range(5):
        assert found.train(client).tolist() == drawn.train(client).tolist()
        assert found.test(client).tolist() == drawn.test(client).tolist()
    assert found.validation().tolist() == drawn.validation().tolist()
    simulate(folder, config)


def test_a_partition_of_a_subset_is_read_within_it(tmp_path: Path) -> None:
    path, division = saved(tmp_path, train_limit=50)
    found = read(path, train_limit=50)
    assert found.hash() == division.hash()
    assert [found.train(c).tolist() for c in range(4)] == [division.train(c).tolist() for c in range(4)]
    with pytest.raises(PartitionError, match=r"examples that task.train_limit 40 leaves out"):
        read(path, train_limit=40)


def test_natural_clients_keep_their_owners(tmp_path: Path) -> None:
    owners, of_test = np.repeat(np.arange(9), 10), np.arange(9).repeat(2)
    there = {"owners": owners, "test_labels": LABELS[:18], "test_owners": of_test}
    options = {"partition": "natural"}
    division = divide(LABELS, TaskContext(1, 4, Path(), options), **there)
    division.save(tmp_path / "partition.npz")
    found = divide(LABELS, TaskContext(1, 4, Path(), options, tmp_path / "partition.npz"), **there)
    assert [found.test(c).tolist() for c in range(4)] == [division.test(c).tolist() for c in range(4)]


def test_another_partition_is_an_error_that_names_both(tmp_path: Path) -> None:
    folder, other = begun(tmp_path / "run"), begun(tmp_path / "other", "seed=202")
    hashes = [environment(f)["partition_sha256"] for f in (folder, other)]
    shutil.copy(other / "partition.npz", folder)
    with pytest.raises(RunError, match=rf"partition of SHA-256 {hashes[0]}, the task now gives {hashes[1]}"):
        make_task(config_of(tmp_path), folder)
    with pytest.raises(RunError, match="start another run"):
        simulate(folder, config_of(tmp_path))


def test_a_run_from_before_partitions_were_saved_is_drawn_and_checked(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    (folder / "partition.npz").unlink()
    make_task(config_of(tmp_path), folder)
    with pytest.raises(RunError, match="began with the partition of SHA-256"):
        make_task(config_of(tmp_path, "seed=202"), folder)


def test_a_run_whose_server_had_no_task_knows_no_partition(tmp_path: Path) -> None:
    first = begun(tmp_path / "first")
    folder = create_run(config_of(tmp_path / "run"), None, first / "initial.safetensors", body="server")
    assert not (folder / "partition.npz").exists()
    make_task(config_of(tmp_path), folder)


# Damage


def test_other_data_are_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(
        PartitionError, match=r"divides other data: .* SHA-256 [0-9a-f]{64}, those .* restore"
    ):
        read(path, labels=LABELS[::-1])


def test_another_number_of_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="over 4 clients, not 5"):
        read(saved(tmp_path)[0], clients=5)


@pytest.mark.parametrize("what", ["cut", "empty", "text", "array", "flip"])
def test_a_damaged_file_is_named(tmp_path: Path, what: str) -> None:
    path, _ = saved(tmp_path)
    content = path.read_bytes()
    if what == "array":
        with path.open("wb") as file:
            np.save(file, LABELS)
    else:
        at = content.index(b"indices") + 60
        changed = {
            "cut": content[:-30],
            "empty": b"",
            "text": b"<html>",
            "flip": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
        }
        path.write_bytes(changed[what])
    with pytest.raises(PartitionError, match=r"partition.npz is damaged: .*; restore it from a copy"):
        read(path)


@pytest.mark.parametrize(
    ("sizes", "indices"),
    [
        ([2, 1], [0, 1]),
        ([2, 0], [0, 1]),
        ([], []),
        ([1, 1], [0, 90]),
        ([1, 1], [-1, 3]),
        ([1, 1], [3, 3]),
        ([[1, 1]], [0, 1]),
    ],
)
def test_lists_that_are_no_partition_are_refused(tmp_path: Path, sizes, indices) -> None:
    path, _ = saved(tmp_path)
    with np.load(path) as file:
        rule = file["rule"]
    np.savez(path, rule=rule, sizes=np.array(sizes, np.int64), indices=np.array(indices, np.int64))
    with pytest.raises(PartitionError, match="is damaged"):
        read(path, clients=2)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        read(tmp_path)  # a folder
