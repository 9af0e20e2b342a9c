"""Makes the model files of a test session, each once."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import numpy as np
from dspine import PairOptions
from dspine_bench.golden_target import write_qwen3_target

from support.drafters import RandomDrafter, convert, unit_checkpoint
from support.golden import GOLDEN, load_case
from support.targets import (
    Shape,
    write_mrope_target,
    write_qwen35_target,
    write_random_target,
)

# One thread: these models are so small that threads mostly wait for each other. F32 caches and
# no flash attention, as the tight comparisons need.
EXACT = PairOptions(
    n_ctx=1024,
    n_threads=1,
    flash_attn="off",
    type_k="f32",
    type_v="f32",
    type_k_draft="f32",
    type_v_draft="f32",
)


class Workshop:
    """Paths of model files under one directory, made when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Per instance, so that a session's files are forgotten with it.
        self.unit_target = functools.cache(self._unit_target)
        self.unit = functools.cache(self._unit)
        self.e2e_target = functools.cache(self._e2e_target)
        self.e2e = functools.cache(self._e2e)
        self.random_target = functools.cache(self._random_target)
        self.random = functools.cache(self._random)
        self.target_tensors = functools.cache(self._target_tensors)

    def _unit_target(self, name: str) -> Path:
        case = load_case(name)
        # Both architectures are covered over the cases.
        arch = "llama" if name == "sliding" else "qwen3"
        shape = Shape(*case.embed.shape[::-1], layers=case.config["num_target_layers"])
        path = self.root / f"{name}-target.gguf"
        return write_random_target(path, arch, shape, case.embed, case.head, name)

    def _unit(self, name: str, kind: str, *, fold: bool = False) -> tuple[Path, Path]:
        """Target and drafter of a unit case; `kind` is a type of dspine-convert."""
        target = self.unit_target(name)
        checkpoint = unit_checkpoint(load_case(name), self.root / name)
        out = self.root / "folded" if fold else self.root
        return target, convert(checkpoint, target, out, kind, fold=fold)[kind]

    def _e2e_target(self, name: str) -> Path:
        write = write_qwen3_target if name == "e2e_qwen3" else write_qwen35_target
        return write(GOLDEN / name / "target", self.root / f"{name}-target.gguf")

    def _e2e(
        self, name: str, kind: str, draft: str = "draft", *, fold: bool = False
    ) -> tuple[Path, Path]:
        """Target and drafter of an end-to-end case."""
        target = self.e2e_target(name)
        out = self.root / ("folded" if fold else "") / name
        return target, convert(GOLDEN / name / draft, target, out, kind, fold=fold)[kind]

    def _random_target(self, arch: str, hidden: int, vocab: int, layers: int = 4) -> Path:
        path = self.root / f"{arch}-{hidden}-{vocab}-{layers}.gguf"
        shape = Shape(hidden, vocab, layers)
        if arch == "qwen35":
            return write_mrope_target(path, shape)
        return write_random_target(path, arch, shape)

    def _random(
        self, drafter: RandomDrafter, arch: str = "llama", *, fold: bool = False
    ) -> tuple[Path, Path]:
        """Target of `arch` and a random drafter, both F32."""
        target = self.random_target(arch, drafter.hidden, drafter.vocab, drafter.target_layers)
        folder = drafter.write(self.root / f"random-{abs(hash((drafter, arch))):x}")
        out = folder / "folded" if fold else folder
        return target, convert(folder, target, out, fold=fold)["f32"]

    def _target_tensors(self, path: Path) -> dict[str, np.ndarray]:
        """Embeddings and head of an F32 target: [vocab, hidden]."""
        wanted = ("token_embd.weight", "output.weight")
        tensors = gguf.GGUFReader(path).tensors
        return {t.name: t.data.copy() for t in tensors if t.name in wanted}
