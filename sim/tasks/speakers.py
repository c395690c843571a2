"""Texts by speaker: a play as plain text, or LEAF's windows; characters are stored once, windows are where they start.

A window is a context of 80 characters and the character after it (LEAF: Caldas et al., 2018).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedreuse.client.errors import TaskError

CONTEXT = 80
WINDOW = CONTEXT + 1
SHARE = 10
"""One character in so many of each speaker is tested on, and as many validate."""
ALPHABET = 256

Starts = NDArray[np.int64]
_SPEECH = re.compile(r"(?:^|\n\n)([^\n:]+):\n")


@dataclass(frozen=True)
class Speaker:
    """train, validation, test: where windows start; characters: how many there are of the speaker.

    Windows of training share no character with those of validation, nor those with the ones of the test.
    """

    name: str
    characters: int
    train: Starts
    validation: Starts
    test: Starts

    @property
    def complete(self) -> bool:
        """There is something to train, to validate and to test on."""
        return min(len(self.train), len(self.validation), len(self.test)) > 0


@dataclass(frozen=True)
class Speakers:
    """characters: (n,) uint8, indices into the alphabet, which holds every character that occurs, by code point."""

    characters: NDArray[np.uint8]
    alphabet: str
    speakers: list[Speaker]


def read(path: Path, stride: int) -> Speakers:
    """The speakers of a plain text or of a folder in LEAF's format; of their windows every `stride`-th.

    Raises TaskError.
    """
    return _leaf(path, stride) if path.is_dir() else _play(path, stride)


def _encoded(texts: list[str], path: Path) -> tuple[NDArray[np.uint8], str]:
    text = "".join(texts)
    alphabet = "".join(sorted(set(text)))
    if len(alphabet) > ALPHABET:
        raise TaskError(
            f"{path} has {len(alphabet)} different characters; {ALPHABET} are the most that are learnt"
        )
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.array([ord(character) for character in alphabet], np.uint32)
    return np.searchsorted(known, points).astype(np.uint8), alphabet


# ---------------------------------------------------------------- plain text


def _play(path: Path, stride: int) -> Speakers:
    """A speech begins with a line `NAME:` after an empty line. A name is one speaker, in whatever plays it occurs.

    A speaker's speeches follow each other in the order of the text, each ended by a new line. Of these n characters
    the last n // 10 are tested on, the n // 10 before them validate; windows lie in one of the three parts.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is no text in UTF-8 ({error})") from error
    pieces = _SPEECH.split(text)
    speeches: dict[str, list[str]] = {}
    for name, speech in zip(pieces[1::2], pieces[2::2], strict=True):
        speeches.setdefault(name, []).append(f"{speech}\n")
    if not speeches:
        raise TaskError(f"{path} names no speakers: a speech begins with a line NAME: after an empty line")
    texts = {name: "".join(own) for name, own in speeches.items()}
    characters, alphabet = _encoded(list(texts.values()), path)
    speakers, start = [], 0
    for name, own in texts.items():
        end, tenth = start + len(own), len(own) // SHARE
        cuts = [start, end - 2 * tenth, end - tenth, end]
        parts = [_windows(first, last, stride) for first, last in pairwise(cuts)]
        speakers.append(Speaker(name, len(own), *parts))
        start = end
    return Speakers(characters, alphabet, speakers)


def _windows(first: int, last: int, stride: int) -> Starts:
    """Starts of windows within the characters from `first` to before `last`."""
    return np.arange(first, max(first, last - CONTEXT), stride)


# ---------------------------------------------------------------- LEAF


def _leaf(folder: Path, stride: int) -> Speakers:
    """Folders `train` and `test` of JSON files with `users`, `num_samples`, `user_data`: {user: {x, y}}.

    Test windows are the files'. Of a user's training windows, in the order of the file, the last tenth (rounded
    down, at least one) validate; those before them that share a character with them are left out.
    """
    texts: list[str] = []
    starts: dict[str, dict[str, Starts]] = {"train": {}, "test": {}}
    size: dict[str, int] = {}
    position = 0
    for part, found in starts.items():
        for path in _json_files(folder, part):
            for user, contexts, nexts in _users(path):
                if user in found:
                    raise TaskError(f"{path}: user {user!r} is there twice in {folder / part}")
                own, text = _joined(contexts, nexts)
                found[user] = own + position
                texts.append(text)
                size[user] = size.get(user, 0) + len(text)
                position += len(text)
    characters, alphabet = _encoded(texts, folder)
    nothing = np.empty(0, np.int64)
    speakers = []
    for user, train in starts["train"].items():
        held_out = train[len(train) - max(1, len(train) // SHARE) :]
        kept = train[train + WINDOW <= held_out.min(initial=position)]
        test = starts["test"].get(user, nothing)
        speakers.append(Speaker(user, size[user], kept[::stride], held_out[::stride], test[::stride]))
    return Speakers(characters, alphabet, speakers)


def _json_files(folder: Path, part: str) -> list[Path]:
    paths = sorted((folder / part).glob("*.json"))
    if not paths:
        raise TaskError(
            f"{folder / part} holds no .json files; LEAF's folder has train/*.json and test/*.json"
        )
    return paths


def _users(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each user with contexts and next characters, checked."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is no JSON, or cut off ({error})") from error
    data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise TaskError(f"{path} has no user_data: {{user: {{x, y}}}}, as LEAF's files do")
    for user, samples in data.items():
        contexts = _texts(path, user, samples, "x", CONTEXT)
        nexts = _texts(path, user, samples, "y", 1)
        if len(contexts) != len(nexts):
            raise TaskError(f"{path}: user {user!r} has {len(contexts)} x and {len(nexts)} y")
        yield user, contexts, nexts


def _texts(path: Path, user: str, samples: Any, key: str, length: int) -> list[str]:
    values = samples.get(key) if isinstance(samples, dict) else None
    if not isinstance(values, list) or any(not isinstance(v, str) or len(v) != length for v in values):
        raise TaskError(f"{path}: {key} of user {user!r} is no list of texts of {length} characters each")
    return values


def _joined(contexts: list[str], nexts: list[str]) -> tuple[Starts, str]:
    """Where windows start in a text in which those that follow each other by one character overlap."""
    starts = np.empty(len(contexts), np.int64)
    pieces: list[str] = []
    length, before = 0, ""
    for index, (context, character) in enumerate(zip(contexts, nexts, strict=True)):
        window = context + character
        piece = character if context == before[1:] else window
        pieces.append(piece)
        length += len(piece)
        starts[index] = length - WINDOW
        before = window
    return starts, "".join(pieces)
