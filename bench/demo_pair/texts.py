"""Texts in files: JSON lines while they are written, one compressed archive to keep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Text:
    """A prompt and one continuation, as token ids."""

    category: str
    sampled: bool
    prompt: list[int]
    continuation: list[int]


def texts_of(path: Path) -> Iterator[Text]:
    """The texts of a `.jsonl` file or of an archive that `pack` wrote."""
    if path.suffix == ".npz":
        yield from unpack(path)
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Text(**json.loads(line))


def pack(path: Path, texts: Iterable[Text]) -> int:
    """Write texts to a numpy archive (.npz), token ids as 16 bits; returns the number of tokens."""
    listed = list(texts)
    names = sorted({text.category for text in listed})
    tokens = [np.array(text.prompt + text.continuation, np.uint16) for text in listed]
    flat = np.concatenate(tokens)
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(
        temporary,
        tokens=flat,
        lengths=np.array([len(some) for some in tokens], np.uint16),
        prompts=np.array([len(text.prompt) for text in listed], np.uint16),
        sampled=np.array([text.sampled for text in listed]),
        categories=np.array([names.index(text.category) for text in listed], np.uint8),
        names=np.array(names),
    )
    temporary.replace(path)
    return len(flat)


def unpack(path: Path) -> Iterator[Text]:
    with np.load(path) as archive:
        held = {name: archive[name] for name in archive.files}
    ends = held["lengths"].astype(int).cumsum()
    for i, some in enumerate(np.split(held["tokens"], ends[:-1])):
        ids, prompt = some.tolist(), int(held["prompts"][i])
        category = str(held["names"][held["categories"][i]])
        yield Text(category, bool(held["sampled"][i]), ids[:prompt], ids[prompt:])
