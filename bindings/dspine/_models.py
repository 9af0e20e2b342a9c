"""The files behind -m and -md: local ones, and those of the hub, downloaded into its cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dspine_convert.hub import cached_file

from dspine import _headers
from dspine._address import ServerError
from dspine._headers import HUB_NAME, PART, Header, HeaderError, open_header


@dataclass(frozen=True)
class Model:
    """A GGUF model; of a file on the hub nothing but the header need be here.

    Attributes:
        spec: the file, or REPO:FILE of the hub.
        header: metadata and tensors; None for a file that cannot be read and is used by force.
        repo, name: its place on the hub; of a split file the first part. None for a local file.
    """

    spec: str
    header: Header | None
    repo: str | None = None
    name: str | None = None

    def parts(self) -> list[str]:
        """Names of all parts of a hub file."""
        name = self.name or ""
        match = PART.fullmatch(Path(name).name)
        if match is None:
            return [name]
        folder = name[: -len(Path(name).name)]
        count = int(match["count"])
        stem = f"{folder}{match['stem']}"
        return [f"{stem}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]

    def local(self) -> Path | None:
        """Where the file lies; None for a file of the hub that is not in the cache."""
        if self.repo is None:
            return Path(self.spec)
        found = [cached_file(self.repo, part, None) for part in self.parts()]
        return found[0] if all(found) else None

    def path(self, *, fetch: bool) -> Path:
        """Where the file lies, downloaded first if need be; or will lie, without `fetch`."""
        return self.local() or (self._download() if fetch else self._future())

    def _download(self) -> Path:
        from huggingface_hub import hf_hub_download

        repo = self.repo or ""
        with _hub_errors(f"{repo}:{self.name}"):
            paths = [Path(hf_hub_download(repo, part)) for part in self.parts()]
        return paths[0]

    def _future(self) -> Path:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.file_download import repo_folder_name

        repo = self.repo or ""
        with _hub_errors(f"{repo}:{self.name}"):
            commit = HfApi().model_info(repo).sha or "main"
        folder = repo_folder_name(repo_id=repo, repo_type="model")
        return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / commit / (self.name or "")


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turn whatever the hub client raises into one line; its types differ between versions."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:300] if lines else type(error).__name__
        raise ServerError(f"{what}: {reason} ({type(error).__name__})") from error


def open_model(spec: str, flag: str) -> Model:
    """Read the header of a model; HeaderError names the flag and what was expected.

    Args:
        spec: a GGUF file, or OWNER/REPO[:FILE or QUANT] on the hub.
        flag: "-m" or "-md", for messages.
    """
    path = Path(spec)
    if path.is_dir():
        raise HeaderError(f"{flag} {spec}: a directory, expected a GGUF file{_advice(spec, flag)}")
    match = None if path.exists() or path.is_symlink() else HUB_NAME.fullmatch(spec)
    if match is None or (spec.endswith(".gguf") and ":" not in spec):
        return Model(spec, open_header(spec))
    repo = match["repo"]
    try:
        name = _headers.hub_file(repo, match["part"])
    except HeaderError as error:
        raise HeaderError(f"{flag} {error}{_advice(spec, flag)}") from None
    whole = f"{repo}:{name}"
    return Model(whole, open_header(whole), repo, name)


def _advice(spec: str, flag: str) -> str:
    """How a drafter's checkpoint becomes a GGUF file."""
    path = Path(spec)
    if flag != "-md" or (path.is_dir() and not (path / "config.json").is_file()):
        return ""
    return (
        f"\na checkpoint is converted first: dspine-convert {spec.partition(':')[0]} "
        "--target TARGET.gguf -t q4_k_m"
    )


def check_pair(target: Model, draft: Model | None) -> None:
    """Refuse files in the wrong place and a drafter of another target.

    Raises HeaderError, which names the file, what was expected and what was found.
    """
    ours, theirs = target.header, None if draft is None else draft.header
    if ours is not None and ours.kind != "target":
        raise HeaderError(f"-m {ours.spec}: {ours.describe_kind()}, expected the target")
    if theirs is None:
        return
    if theirs.kind != "drafter":
        raise HeaderError(f"-md {theirs.spec}: {theirs.describe_kind()}, expected a DSpine drafter")
    if ours is not None:
        _headers.check_partner(ours, theirs)
