"""Collected sequences as training blocks: memory-mapped files, anchors drawn at random."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demo_pair.target import quicker_type

HIDDEN = 576
TOP_STORED = 32
SAMPLED_WEIGHT = 0.5
TOP_USED = 5  # the target's likeliest tokens that the losses look at


@dataclass(frozen=True)
class Sequence:
    part: int
    start: int
    length: int
    prompt: int
    category: str
    sampled: bool


@dataclass(frozen=True)
class Batch:
    """b sequences with n blocks of t rows each; index r of the last axis is block row r + 1."""

    taps: Tensor  # [b, c, taps * hidden]
    anchors: Tensor  # [b, n] positions
    anchor_tokens: Tensor  # [b, n]
    labels: Tensor  # [b, n, t - 1] true tokens of rows 1..
    valid: Tensor  # [b, n, t - 1]
    top_ids: Tensor  # [b, n, t - 1, TOP_USED] the target's own distribution there
    top_p: Tensor
    finals: Tensor  # [b, n, t - 1, hidden] what the target's head read to say it


@dataclass(frozen=True)
class Part:
    """The files of one folder of collect.py."""

    tokens: npt.NDArray[np.int32]
    taps: npt.NDArray[np.float16]
    top_ids: npt.NDArray[np.int32]
    top_lp: npt.NDArray[np.float16]
    finals: npt.NDArray[np.float16] | None  # of bulk.py; only to train on


def draw_anchors(rng: np.random.Generator, start: int, end: int, n: int) -> npt.NDArray[np.int64]:
    """n positions from `start` up to `end`, in order; one twice only where there are too few."""
    return np.sort(start + rng.choice(end - start, n, replace=end - start < n))


def open_part(folder: Path, width: int, with_finals: bool) -> Part:
    def view(name: str, dtype: Any, columns: int) -> Any:
        flat = np.memmap(folder / f"{name}.bin", dtype, "r")
        return flat[: len(flat) // columns * columns].reshape(-1, columns)

    return Part(
        view("tokens", np.int32, 1)[:, 0],
        view("taps", np.float16, width),
        view("top_ids", np.int32, TOP_STORED),
        view("top_lp", np.float16, TOP_STORED),
        view("finals", np.float16, HIDDEN) if with_finals else None,
    )


class Corpus:
    def __init__(self, folders: list[Path], width: int, with_finals: bool = False) -> None:
        """`with_finals`: the folders are of `bulk.py read`, as `sample` needs them."""
        self.folders, self.width, self.with_finals = folders, width, with_finals
        self.reload()

    def reload(self) -> None:
        """Take up what collect.py has added since."""
        self.parts, self.sequences = [], []
        for folder in self.folders:
            index = folder / "index.jsonl"
            if not index.exists() or not index.stat().st_size:
                continue
            # The index first: the files hold at least what it names.
            lines = index.read_text(encoding="utf-8").splitlines()
            self.parts.append(open_part(folder, self.width, self.with_finals))
            for line in lines:
                entry = json.loads(line)
                if entry["length"] - entry["prompt"] > 2:
                    self.sequences.append(Sequence(len(self.parts) - 1, **entry))
        spoken = np.array([s.length - s.prompt for s in self.sequences], float)
        self.tokens = int(spoken.sum())
        # Greedy text is what the accepted length is measured on; drawn text is there for variety.
        wanted = spoken * np.where([s.sampled for s in self.sequences], SAMPLED_WEIGHT, 1.0)
        self.weights = wanted / max(wanted.sum(), 1.0)

    def rows(self, seq: Sequence, name: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = getattr(self.parts[seq.part], name)
        return array[seq.start : seq.start + seq.length]

    def sample(self, rng: np.random.Generator, b: int, n: int, rows: int) -> Batch:
        """b sequences, longer ones more often; n blocks each, in the target's own text."""
        chosen = [self.sequences[i] for i in rng.choice(len(self.sequences), b, p=self.weights)]
        anchors = np.stack([draw_anchors(rng, s.prompt, s.length - 1, n) for s in chosen])
        return self.batch(chosen, anchors, rows)

    def batch(self, chosen: list[Sequence], anchors: npt.NDArray[np.int64], rows: int) -> Batch:
        length = int(anchors.max())
        taps = torch.zeros(len(chosen), length, self.width, dtype=quicker_type())
        for row, seq in enumerate(chosen):
            some = np.array(self.rows(seq, "taps")[:length])
            taps[row, : len(some)] = torch.from_numpy(some)
        steps = np.arange(1, rows)
        places = anchors[..., None] + steps  # positions of the labels
        last = np.array([s.length for s in chosen])[:, None, None] - 1
        valid, places = places <= last, np.minimum(places, last)
        pick = [(seq, places[row]) for row, seq in enumerate(chosen)]
        labels = np.stack([self.rows(s, "tokens")[p] for s, p in pick])
        first = np.stack([self.rows(s, "tokens")[a] for s, a in zip(chosen, anchors, strict=True)])
        ids = np.stack([self.rows(s, "top_ids")[p - 1][..., :TOP_USED] for s, p in pick])
        lps = np.stack([self.rows(s, "top_lp")[p - 1][..., :TOP_USED] for s, p in pick])
        return Batch(
            taps,
            torch.from_numpy(anchors),
            torch.from_numpy(first).long(),
            torch.from_numpy(labels).long(),
            torch.from_numpy(valid),
            torch.from_numpy(ids).long(),
            torch.from_numpy(lps.astype(np.float32)).exp(),
            self.finals(pick),
        )

    def finals(self, pick: list[tuple[Sequence, npt.NDArray[np.int64]]]) -> Tensor:
        """[b, n, t - 1, hidden] at the given places; without columns where there are none."""
        if not self.with_finals:
            return torch.zeros(len(pick), *pick[0][1].shape, 0)
        return torch.from_numpy(np.stack([self.rows(s, "finals")[p - 1] for s, p in pick]))
