"""The token list's hash: made in Python at conversion, compared in C++ at load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
from dspine import LoadError, Pair
from support.drafters import RandomDrafter, convert
from support.gguf_edit import Typed, rewrite
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.native

DRAFTER = RandomDrafter(hidden=96, vocab=128, target_layers=4)
CONTROL, UNUSED = gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
# What llama.cpp treats specially when it loads a vocabulary, and what text encoding could break.
ODD = {
    20: ("<unused7>", CONTROL),  # gets the unused mark at load, by its text
    21: ("[PAD21]", UNUSED),
    22: ("", gguf.TokenType.NORMAL),  # is renamed at load
    23: ("▁é😀", gguf.TokenType.NORMAL),
    24: ("</s>", gguf.TokenType.NORMAL),  # becomes a control token at load
}


def _target(source: Path, path: Path, odd: Mapping[int, tuple[str, int]]) -> Path:
    fields = gguf.GGUFReader(source).fields
    tokens = list(fields["tokenizer.ggml.tokens"].contents())
    types = list(fields["tokenizer.ggml.token_type"].contents())
    for token, (text, kind) in odd.items():
        tokens[token], types[token] = text, int(kind)
    array = gguf.GGUFValueType.ARRAY
    values: dict[str, Typed | None] = {
        "tokenizer.ggml.tokens": ((array, gguf.GGUFValueType.STRING), tokens),
        "tokenizer.ggml.token_type": ((array, gguf.GGUFValueType.INT32), types),
    }
    return rewrite(source, path, values)


@pytest.fixture(scope="module")
def odd_pair(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A plain target, the same with odd tokens, and a drafter converted for the odd one."""
    folder = tmp_path_factory.mktemp("fingerprint")
    plain = workshop.random_target("llama", 96, 128)
    odd = _target(plain, folder / "odd.gguf", ODD)
    return plain, odd, convert(DRAFTER.write(folder / "draft"), odd, folder)["f32"]


def test_odd_tokens_hash_alike(odd_pair: tuple[Path, Path, Path]) -> None:
    _, odd, draft = odd_pair
    with Pair(odd, draft, EXACT) as pair:
        assert pair.info.n_vocab == 128


def test_padding_may_differ(odd_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    plain, _, draft = odd_pair
    padded = _target(plain, tmp_path / "padded.gguf", {**ODD, 21: ("<extra_21>", UNUSED)})
    Pair(padded, draft, EXACT).close()


@pytest.mark.parametrize("token", sorted(set(ODD) - {21}))
def test_every_other_token_counts(
    token: int, odd_pair: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    plain, _, draft = odd_pair
    changed = {**ODD, token: (f"other{token}", ODD[token][1])}
    with pytest.raises(LoadError, match="token list hash"):
        Pair(_target(plain, tmp_path / "changed.gguf", changed), draft, EXACT)
