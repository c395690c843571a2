"""Next characters by speaker: how texts are cut, LEAF's files, who takes part, and a run that repeats bit for bit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import completed, final_state, small_config, table

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext, load_task
from fedreuse.sim.tasks.shakespeare import Shakespeare
from fedreuse.sim.tasks.speakers import Speakers, read

DATA = Path(
    os.environ.get("FEDREUSE_TEST_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data")
)
TINY = DATA / "tinyshakespeare.txt"
needs_data = pytest.mark.skipif(
    not TINY.is_file(), reason=f"no {TINY.name} in {DATA}; see FEDREUSE_TEST_DATA"
)

LETTERS = "abcdefghij klmno"


def speech(name: str, length: int) -> str:
    """Characters that differ from speaker to speaker."""
    rng = np.random.default_rng(list(name.encode()))
    return "".join(rng.choice(list(LETTERS), length))


def play(folder: Path, **lengths: int) -> Path:
    """Each speaker's text in two speeches, so that it has as many characters with the two new lines at their ends."""
    halves = [
        [f"{name}:\n{speech(name, length - 2)[part]}" for name, length in lengths.items()]
        for part in (slice(100), slice(100, None))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tinyshakespeare.txt"
    path.write_text("\n\n".join(halves[0] + halves[1]))
    return path


def text_of(name: str, length: int) -> str:
    whole = speech(name, length - 2)
    return f"{whole[:100]}\n{whole[100:]}\n"


def task(data: Path, clients: int = 2, **options: Any) -> Shakespeare:
    options = {"partition": {"kind": "natural"}, "minimum_characters": 1000, **options}
    made = load_task("shakespeare", TaskContext(3, clients, data, options))
    assert isinstance(made, Shakespeare)
    return made


def windows(found: Speakers, starts: np.ndarray) -> list[str]:
    return ["".join(found.alphabet[i] for i in found.characters[at : at + 81]) for at in starts]


def spoken(made: Shakespeare, data: Any) -> list[str]:
    """Contexts with the characters that follow."""
    x, y = data.batch(np.arange(len(data)))
    rows = torch.cat([x, y[:, None]], 1).tolist()
    return ["".join(made.alphabet[i] for i in row) for row in rows]


# Plain text


def test_a_text_is_cut_by_hand(tmp_path: Path) -> None:
    """Of 1,015 characters the last 101 are tested on, 101 before validate, 813 are left; of 850 it is 85, 85, 680."""
    found = read(play(tmp_path, ANNE=1015, BOB=850), stride=1)
    anne, bob = found.speakers
    assert (anne.name, anne.characters, bob.name, bob.characters) == ("ANNE", 1015, "BOB", 850)
    # As many windows as characters, but for 80.
    assert [len(part) for part in (anne.train, anne.validation, anne.test)] == [733, 21, 21]
    assert [len(part) for part in (bob.train, bob.validation, bob.test)] == [600, 5, 5]
    own = text_of("ANNE", 1015)
    assert windows(found, anne.train) == [own[i : i + 81] for i in range(733)]
    assert windows(found, anne.validation) == [own[i : i + 81] for i in range(813, 834)]
    assert windows(found, anne.test) == [own[i : i + 81] for i in range(914, 935)]
    assert windows(found, bob.test)[-1] == text_of("BOB", 850)[-81:]
    assert found.alphabet == "\n" + "".join(sorted(LETTERS))


@given(length=st.integers(103, 3000), stride=st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_no_window_crosses_a_cut(tmp_path_factory: pytest.TempPathFactory, length: int, stride: int) -> None:
    (speaker,) = read(play(tmp_path_factory.mktemp("play"), ANNE=length), stride).speakers
    held = [
        {i for start in part for i in range(start, start + 81)}
        for part in (speaker.train, speaker.validation, speaker.test)
    ]
    tenth = length // 10
    for part, last in zip(held, (length - 2 * tenth, length - tenth, length), strict=True):
        assert not part or max(part) < last
    assert not held[0] & held[1]
    assert not held[1] & held[2]
    assert speaker.complete == (tenth >= 81)


@needs_data
def test_the_real_text_against_the_expression_of_its_readme() -> None:
    found = read(TINY, stride=1)
    text = TINY.read_text()
    texts: dict[str, str] = {}
    for name, own in re.findall(r"(?:^|\n\n)([^\n:]+):\n(.*?)(?=\n\n[^\n:]+:\n|\Z)", text, flags=re.S):
        texts[name] = texts.get(name, "") + own + "\n"
    assert (len(found.speakers), len(found.alphabet)) == (303, len(set(text))) == (303, 65)
    assert {speaker.name: speaker.characters for speaker in found.speakers} == {
        name: len(own) for name, own in texts.items()
    }
    leontes = next(speaker for speaker in found.speakers if speaker.name == "LEONTES")
    assert windows(found, leontes.train[[0, 500]]) == [texts["LEONTES"][:81], texts["LEONTES"][500:581]]
    assert sum(speaker.characters >= 2000 for speaker in found.speakers) == 99
    # One byte a character; windows are numbers.
    assert found.characters.nbytes == sum(map(len, texts.values()))


# LEAF


def samples(text: str) -> dict[str, Any]:
    count = len(text) - 80
    return {"x": [text[i : i + 80] for i in range(count)], "y": [text[i + 80] for i in range(count)]}


def leaf(folder: Path, split: int = 900, **lengths: int) -> Path:
    """LEAF's files: training samples of the first `split` characters, test samples of the others."""
    for number, (name, length) in enumerate(lengths.items()):
        own = text_of(name, length)
        for part, text in (("train", own[:split]), ("test", own[split:])):
            (folder / part).mkdir(parents=True, exist_ok=True)
            data = samples(text)
            content = {"users": [name], "num_samples": [len(data["x"])], "user_data": {name: data}}
            (folder / part / f"all_data_{number}.json").write_text(json.dumps(content))
    return folder


def test_leaf_s_windows_are_its_files(tmp_path: Path) -> None:
    """820 training samples, 82 of them validate, and the 80 before those share characters with them: 658 are left."""
    found = read(leaf(tmp_path, ANNE=1100), stride=1)
    (anne,) = found.speakers
    own = text_of("ANNE", 1100)
    assert windows(found, anne.train) == [own[i : i + 81] for i in range(658)]
    assert windows(found, anne.validation) == [own[i : i + 81] for i in range(738, 820)]
    assert windows(found, anne.test) == [own[i : i + 81] for i in range(900, 1020)]
    assert len(found.characters) == 1100  # 940 samples of 81 characters overlap
    assert max(anne.train) + 81 == min(anne.validation)


def test_samples_that_do_not_follow_each_other_are_kept_as_they_are(tmp_path: Path) -> None:
    folder = leaf(tmp_path, ANNE=1100)
    data = samples(text_of("ANNE", 900))
    order = np.random.default_rng(0).permutation(820)
    shuffled = {key: [values[i] for i in order] for key, values in data.items()}
    path = folder / "train" / "all_data_0.json"
    path.write_text(json.dumps({"user_data": {"ANNE": shuffled}}))
    found = read(folder, stride=1)
    (anne,) = found.speakers
    given_ = [x + y for x, y in zip(shuffled["x"], shuffled["y"], strict=True)]
    assert windows(found, anne.validation) == given_[-82:]
    assert windows(found, anne.train) == given_[: len(anne.train)]


def user_data(**samples_: Any) -> str:
    return json.dumps({"user_data": {"ANNE": samples_}})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is no JSON, or cut off"),
        (user_data(x=["a" * 80], y=["b"])[:-9], "is no JSON, or cut off"),
        ("[" * 200_000, "is no JSON, or cut off"),
        ("[]", "has no user_data"),
        ('{"user_data": []}', "has no user_data"),
        ('{"user_data": {"ANNE": 3}}', "x of user 'ANNE' is no list of texts of 80 characters"),
        (user_data(x=["a" * 79], y=["b"]), "x of user 'ANNE' is no list of texts of 80"),
        (user_data(x=[[1] * 80], y=["b"]), "x of user 'ANNE' is no list of texts of 80"),
        (user_data(x=["a" * 80], y=["bc"]), "y of user 'ANNE' is no list of texts of 1 char"),
        (user_data(x=["a" * 80], y=[]), "user 'ANNE' has 1 x and 0 y"),
    ],
)
def test_a_hostile_file_is_named(tmp_path: Path, content: str, text: str) -> None:
    folder = leaf(tmp_path, ANNE=1100)
    (folder / "train" / "all_data_0.json").write_text(content)
    with pytest.raises(TaskError, match=rf"all_data_0\.json:? ({text})"):
        read(folder, stride=1)


def test_a_user_twice_and_a_folder_without_files(tmp_path: Path) -> None:
    folder = leaf(tmp_path, ANNE=1100)
    path = folder / "train" / "all_data_0.json"
    (folder / "train" / "more.json").write_text(path.read_text())
    with pytest.raises(TaskError, match=r"more\.json: user 'ANNE' is there twice"):
        read(folder, stride=1)
    for file in (folder / "test").iterdir():
        file.unlink()
    (folder / "train" / "more.json").unlink()
    with pytest.raises(
        TaskError, match=r"test holds no \.json files; LEAF's folder has train/\*\.json and test/"
    ):
        read(folder, stride=1)


# The task


@pytest.mark.parametrize("make", [play, lambda data, **lengths: leaf(data / "shakespeare", **lengths)])
def test_clients_are_the_largest_speakers(tmp_path: Path, make: Callable[..., Path]) -> None:
    lengths = {"ANNE": 1200, "BOB": 1900, "CLEO": 1500, "DAN": 1050, "EVE": 1500}
    make(tmp_path, **lengths)
    made = task(tmp_path, clients=3, stride=7)
    assert [speaker.name for speaker in made.speakers] == ["BOB", "CLEO", "EVE"]
    for client, speaker in enumerate(made.speakers):
        own = text_of(speaker.name, speaker.characters)
        assert all(window in own for window in spoken(made, made.client_data(client)))
        assert len(made.client_data(client)) == len(speaker.train)
        at = made.division.test(client)
        assert all(spoken(made, made.test())[i] in own for i in at)
        assert len(at) == len(speaker.test)
    assert len(made.validation()) == sum(len(speaker.validation) for speaker in made.speakers)
    x, y = made.client_data(0)[0]
    assert (x.shape, y.shape, x.dtype) == ((80,), (), torch.int64)
    assert made.model()(x[None]).shape == (1, len(made.alphabet))


def test_small_speakers_are_left_out_and_too_many_clients_refused(tmp_path: Path) -> None:
    play(tmp_path, ANNE=1200, BOB=1900, CLEO=700)
    for least, fitting in ((1500, 1), (1000, 2), (1, 2)):  # a tenth of 700 holds no window
        with pytest.raises(
            TaskError, match=rf": {fitting} of 3 speakers have at least {least} .* to {fitting} or"
        ):
            task(tmp_path, clients=3, minimum_characters=least)


def test_iid_mixes_speakers_and_labels_divide_nothing(tmp_path: Path) -> None:
    play(tmp_path, ANNE=1200, BOB=1900)
    mixed = task(tmp_path, partition={"kind": "iid"}, stride=1)
    own = text_of("ANNE", 1200)
    shares = [np.mean([window in own for window in spoken(mixed, mixed.client_data(i))]) for i in range(2)]
    # 880 of 880 + 1,440 windows are ANNE's: 0.38, in 1,160 drawn with a deviation of 0.014 or less.
    assert shares == pytest.approx([880 / 2320] * 2, abs=0.06)
    with pytest.raises(
        TaskError, match=r"partition\.kind is dirichlet, which goes by labels.*partition\.kind=nat"
    ):
        task(tmp_path, partition={"kind": "dirichlet"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stride": 0}, r"task\.options\.stride is 0"),
        ({"stride": "ten"}, r"task\.options\.stride is 'ten'"),
        ({"minimum_characters": -1}, r"task\.options\.minimum_characters is -1"),
        ({"source": "gone.txt"}, r"there is no .*/gone\.txt or .*not downloaded.*--data FOLDER"),
        ({"strid": 3}, r"task\.options\.strid is unknown; .* source, minimum_characters, stride"),
        ({"model": "cnn"}, r"'cnn' takes images .* texts of 80 characters; task\.model can be one of: gru"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    play(tmp_path, ANNE=1200, BOB=1900)
    with pytest.raises(TaskError, match=text):
        task(tmp_path, **options)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "names no speakers"),
        (b"no speakers at all", "names no speakers"),
        (b"ANNE:\n\xff\xfe", "is no text in UTF-8"),
        (b"ANNE:\n" + "".join(map(chr, range(300, 600))).encode(), "different characters; 256 are"),
    ],
)
def test_texts_that_are_none(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "tinyshakespeare.txt").write_bytes(content)
    with pytest.raises(
        TaskError, match=rf"tinyshakespeare\.txt {'' if 'diff' not in text else 'has .*'}{text}"
    ):
        task(tmp_path)


def test_a_source_of_one_s_own(tmp_path: Path) -> None:
    path = play(tmp_path / "elsewhere", ANNE=1200, BOB=1900)
    assert [speaker.name for speaker in task(tmp_path, source=str(path)).speakers] == ["BOB", "ANNE"]
    assert len(task(tmp_path, source="elsewhere/tinyshakespeare.txt").speakers) == 2
    with pytest.raises(TaskError, match=rf"no {tmp_path}/shakespeare or {tmp_path}/tinyshakespeare\.txt"):
        task(tmp_path)


def test_a_run_repeats_bit_for_bit(tmp_path: Path) -> None:
    """The GRU, its embedding and its head, in process and with every message serialized."""
    data = tmp_path / "data"
    play(data, ANNE=1200, BOB=1900, CLEO=1500)
    states = []
    for name in ("a", "b"):
        config = small_config(
            tmp_path / name,
            f"data={data}",
            "partition.kind=natural",
            "task.options.minimum_characters=1000",
            "task.options.stride=40",
            "rounds=2",
            "clients.total=3",
            "clients.per_round=2",
            "train.batch_size=16",
            method="dg-fedreuse",
            task="shakespeare",
        )
        folder = completed(config, wire=name == "b")
        states.append(final_state(folder))
        assert all(np.isfinite(float(row["train_loss"])) for row in table(folder))
    assert states[0] == states[1]
