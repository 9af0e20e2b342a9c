"""The flags of llama-server that this package chooses or reads, with all their spellings.

llama.cpp takes the last of several spellings and warns. Here a flag of the user's replaces the
chosen one, whatever either was spelled like, so that a printed command says what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dspine._errors import InvalidError

# By setting: the spellings in llama-server's --help, the one that is written first.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "model": ("-m", "--model"),
    "draft_model": ("-md", "--model-draft", "--spec-draft-model"),
    "n_ctx": ("-c", "--ctx-size"),
    "n_parallel": ("-np", "--parallel"),
    "n_draft": ("--spec-draft-n-max",),
    "gpu_layers": ("-ngl", "--gpu-layers", "--n-gpu-layers"),
    "gpu_layers_draft": (
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        "--spec-draft-ngl",
    ),
    "flash_attn": ("-fa", "--flash-attn"),
    "type_k": ("-ctk", "--cache-type-k"),
    "type_v": ("-ctv", "--cache-type-v"),
    "type_k_draft": ("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
    "type_v_draft": ("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
    "host": ("--host",),
    "port": ("--port",),
    # Read, never chosen: the memory plan and the client need them.
    "n_batch": ("-b", "--batch-size"),
    "n_ubatch": ("-ub", "--ubatch-size"),
    "n_ubatch_draft": ("-ubd", "--spec-draft-ubatch"),
    "api_key": ("--api-key",),
    "api_prefix": ("--api-prefix",),
    "tls": ("--ssl-cert-file",),
}

# These choose the files; they have no place after `--`, where the plan cannot follow them.
FILE_FLAGS: dict[str, str] = {
    **dict.fromkeys(SPELLINGS["model"], "-m"),
    **dict.fromkeys(SPELLINGS["draft_model"], "-md"),
    **dict.fromkeys(("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"), "-m"),
    **dict.fromkeys(
        ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "--models-dir", "--models-preset"),
        "-m and -md",
    ),
}

# With one of these the weights do not lie on one device as the plan assumes.
PLACEMENT_FLAGS = frozenset(
    {"-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"}
    | {"-ncffn", "--n-cpu-ffn", "-nkvo", "--no-kv-offload", "-dev", "--device"}
    | {"-ts", "--tensor-split", "-sm", "--split-mode", "--rpc"}
)


class FlagError(InvalidError):
    """The words for llama-server cannot be used as they are."""


_BY_SPELLING = {spelling: name for name, all_of in SPELLINGS.items() for spelling in all_of}


def normal(word: str) -> str:
    """A word as llama.cpp's parser reads it: underscores of a long flag are dashes."""
    return word.replace("_", "-") if word.startswith("--") else word


@dataclass(frozen=True)
class Flags:
    """A command line without the program: `words` in order, and the settings that it makes.

    Attributes:
        words: flags and values.
        settings: setting (a key of SPELLINGS) to value, of all flags.
        dropped: the settings whose chosen flag gave way to the user's.
    """

    words: tuple[str, ...]
    settings: Mapping[str, str]
    dropped: tuple[str, ...]

    def has(self, *spellings: str) -> bool:
        """Whether one of these words stands in it."""
        return any(normal(word) in spellings for word in self.words)

    def number(self, name: str) -> int | None:
        """A setting as an integer, None where it is not set; FlagError names the flag."""
        value = self.settings.get(name)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise FlagError(f"{SPELLINGS[name][0]} {value}: expected an integer") from None


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """Settings that a command line makes; the last flag of several wins.

    Raises FlagError for one of these flags that stands last and has no value.
    """
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name = _BY_SPELLING.get(normal(word))
        if name is None:
            continue
        value = next(rest, None)
        if value is None:
            raise FlagError(f"{word} needs a value")
        found[name] = value
    return found


def check_extra(extra: Iterable[str]) -> None:
    """Refuse flags after `--` that choose the model files."""
    for word in extra:
        if instead := FILE_FLAGS.get(normal(word)):
            raise FlagError(f"{word} cannot stand after --; give the file with {instead}")


def merge(chosen: Mapping[str, object], extra: Sequence[str]) -> Flags:
    """Chosen settings as flags, those that `extra` makes too left out, then `extra` untouched.

    Args:
        chosen: setting to value, in the order they are written; None values are left out.
        extra: the user's own words.
    """
    check_extra(extra)
    given = settings_of(extra)
    words: list[str] = []
    settings: dict[str, str] = {}
    dropped: list[str] = []
    for name, value in chosen.items():
        if value is None:
            continue
        if name in given:
            dropped.append(name)
            continue
        words += [SPELLINGS[name][0], str(value)]
        settings[name] = str(value)
    return Flags((*words, *extra), settings | given, tuple(dropped))
