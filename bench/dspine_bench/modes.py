"""The modes of a run, from the flags: plain decoding, drafters, depths, caches, temperatures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dspine._memory import CACHE_TYPES

from dspine_bench.errors import BenchError
from dspine_bench.provenance import public_url

PLAIN = "plain"


@dataclass(frozen=True)
class ModeSpec:
    """One mode; `baseline` is the name of the mode it is compared with.

    `n_draft` None leaves the depth to the server. `url` is of a server that runs already.
    """

    name: str
    baseline: str
    drafter: Path | None = None
    n_draft: int | None = None
    cache_type: str | None = None
    temperature: float = 0.0
    url: str | None = None

    @property
    def server(self) -> tuple[object, ...]:
        """Modes with the same key share a server: the temperature is a request's."""
        return (self.url, self.drafter, self.n_draft, self.cache_type)


def parse_sweep(text: str) -> list[int]:
    """The depths of `n-draft=2,3,4`; BenchError for anything else."""
    name, _, values = text.partition("=")
    if name.strip().replace("_", "-") != "n-draft" or not values:
        raise BenchError(f"--sweep {text}: expected n-draft=2,3,4")
    try:
        depths = [int(value) for value in values.split(",")]
    except ValueError:
        raise BenchError(f"--sweep {text}: expected integers behind n-draft=") from None
    if any(depth < 1 for depth in depths):
        raise BenchError(f"--sweep {text}: a depth is at least 1 (plain decoding always runs)")
    return list(dict.fromkeys(depths))


def _labels(drafters: Sequence[Path]) -> list[str]:
    """Short names that tell the drafters apart."""
    if len({d.stem for d in drafters}) == len(drafters):
        return [d.stem for d in drafters]
    return [f"{d.parent.name}/{d.stem}" for d in drafters]


def _apart(temperatures: Sequence[float]) -> list[float]:
    """Each once; BenchError for two that a name, of six digits, does not tell apart."""
    found = list(dict.fromkeys(temperatures))
    names = [f"{temperature:g}" for temperature in found]
    if len(set(names)) < len(names):
        raise BenchError(f"--temperature: two that are both {max(names, key=names.count)}")
    return found


def expand(
    drafters: Sequence[Path],
    depths: Sequence[int] = (),
    caches: Sequence[str] = ("q8_0",),
    temperatures: Sequence[float] = (0.0,),
    own: Mapping[Path, int] | None = None,
) -> list[ModeSpec]:
    """Every drafter at every depth, with a plain mode for each cache type and temperature.

    `own`: the drafters' own depths, used without `depths`; one that is not in it is the server's
    to choose. BenchError where two drafters cannot be told apart, and for a cache type that there
    is not.
    """
    labels = _labels(drafters)
    if len(set(labels)) != len(labels):
        raise BenchError(f"--drafter: two of the same name: {', '.join(labels)}")
    for cache in caches:
        if cache not in CACHE_TYPES:
            raise BenchError(f"--kv {cache}: expected one of {', '.join(CACHE_TYPES)}")
    caches, temperatures = list(dict.fromkeys(caches)), _apart(temperatures)
    modes: list[ModeSpec] = []
    for cache, temperature in itertools.product(caches, temperatures):
        tail = f" {cache}" if len(caches) > 1 else ""
        tail += f" T={temperature:g}" if len(temperatures) > 1 else ""
        plain = f"{PLAIN}{tail}"
        modes.append(ModeSpec(plain, plain, None, 0, cache, temperature))
        for label, drafter in zip(labels, drafters, strict=True):
            for depth in depths or ((own or {}).get(drafter),):
                name = f"{label} n={depth}" if depths else label
                modes.append(ModeSpec(name + tail, plain, drafter, depth, cache, temperature))
    return modes


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        return False


def remote(url: str, baseline: str, temperatures: Sequence[float] = (0.0,)) -> list[ModeSpec]:
    """Two servers that run already, the second without a drafter; BenchError for no URL."""
    for flag, one in (("--url", url), ("--url-baseline", baseline)):
        if not _is_url(one):
            raise BenchError(f"{flag} {public_url(one)}: expected http://HOST:PORT")
    modes: list[ModeSpec] = []
    temperatures = _apart(temperatures)
    for temperature in temperatures:
        tail = f" T={temperature:g}" if len(temperatures) > 1 else ""
        plain = f"{PLAIN}{tail}"
        modes.append(ModeSpec(plain, plain, None, 0, None, temperature, baseline))
        modes.append(ModeSpec(f"server{tail}", plain, None, None, None, temperature, url))
    return modes
