"""The Hugging Face hub: needed files only, its cache and offline mode honoured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dspine_convert.checkpoint import MAX_HEADER_BYTES, is_natural, parse_json
from dspine_convert.errors import ConvertError
from dspine_convert.gguf_format import Header, NeedMoreDataError, read_header

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
REPO_FILE = re.compile(rf"(?P<repo>{REPO_ID.pattern}):(?P<file>[^:]+\.gguf)")
FIRST_PIECE = 4 << 20
MAX_PIECE = 256 << 20
PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class HubSource:
    """A repository on the hub, fetched; `revision` is the commit of the snapshot."""

    repo: str
    revision: str
    directory: Path


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turn whatever the hub client raises into one line; its types differ between versions."""
    try:
        yield
    except (ConvertError, NeedMoreDataError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:300] if lines else type(error).__name__
        raise ConvertError(f"{what}: {reason} ({type(error).__name__})") from error


def is_offline() -> bool:
    """True when the user asked the hub client to stay off the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def snapshot_identity(directory: Path) -> tuple[str, str] | None:
    """Repository id and commit of a directory inside a hub cache, or None."""
    parts = directory.absolute().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return None
    return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]


def _snapshot(repo: str, revision: str | None, *, cached: bool = False) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(
        repo,
        revision=revision,
        allow_patterns=list(PATTERNS),
        ignore_patterns=["*/*"],
        local_files_only=cached,
    )


def fetch_checkpoint(repo: str, revision: str | None) -> HubSource:
    """Download config and weights of a repository, or find them in the cache."""
    with _hub_errors(f"hub repository {repo!r}"):
        where = _snapshot(repo, revision)
    directory = Path(where)
    return HubSource(repo, directory.name, directory)


def cached_file(repo: str, name: str, revision: str | None) -> Path | None:
    """The file in the local cache, if it is there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


class RemoteFile:
    """One file on the hub, read in byte ranges; `size` is known after the first of them."""

    def __init__(self, repo: str, name: str, revision: str | None) -> None:
        self.what = f"{repo}:{name}"
        self.where = (repo, name, revision)
        self.size = 0

    def read(self, first: int, end: int) -> bytes:
        """Bytes [first, end) of the file, fewer where it ends before."""
        from huggingface_hub import hf_hub_url, utils

        # The package fills its namespace on demand, which type checkers cannot follow.
        client: Any = utils
        repo, name, revision = self.where
        url = hf_hub_url(repo, name, revision=revision)
        headers = {**client.build_hf_headers(), "Range": f"bytes={first}-{end - 1}"}
        headers["Accept-Encoding"] = "identity"
        with _get(client.get_session(), url, headers) as response:
            if response.status_code == 416:
                return b""
            client.hf_raise_for_status(response)
            whole = response.status_code != 206  # no ranges here: skip what comes before
            length = response.headers.get("Content-Length" if whole else "Content-Range", "0")
            self.size = int(length.rpartition("/")[2])
            return _take(response, first if whole else 0, end - first)


def _take(response: Any, skip: int, count: int) -> bytes:
    """`count` bytes of a streamed body after `skip`; the rest is not fetched."""
    data = bytearray()
    # httpx in huggingface_hub 1.0 and later, requests before.
    pieces = getattr(response, "iter_bytes", None) or response.iter_content
    for piece in pieces(1 << 20):
        data += piece
        if len(data) >= skip + count:
            break
    return bytes(data[skip : skip + count])


def _get(session: Any, url: str, headers: dict[str, str]) -> Any:
    """Start a streamed GET with whichever client this huggingface_hub uses."""
    if callable(getattr(session, "stream", None)):
        return session.stream("GET", url, headers=headers, follow_redirects=True)
    return session.get(url, headers=headers, stream=True)


def read_remote_header(repo: str, name: str, revision: str | None) -> Header:
    """Read a GGUF header with growing byte ranges; the tensor data stays where it is."""
    file = RemoteFile(repo, name, revision)
    if is_offline():
        raise ConvertError(f"{file.what}: not in the local cache, and HF_HUB_OFFLINE is set")
    data, wanted = b"", FIRST_PIECE
    with _hub_errors(file.what):
        while True:
            data += file.read(len(data), wanted)
            try:
                return read_header(memoryview(data), with_tensors=False)
            except NeedMoreDataError as error:
                if len(data) < wanted:
                    raise ConvertError(
                        f"{file.what}: truncated GGUF, its header needs {error.at_least} bytes"
                    ) from None
                wanted = max(wanted * 2, error.at_least)
                if wanted > MAX_PIECE:
                    raise ConvertError(
                        f"{file.what}: header needs {error.at_least} bytes, "
                        f"over {MAX_PIECE} is refused"
                    ) from None


def _skeleton(file: RemoteFile, path: Path) -> None:
    """A sparse copy of a safetensors file: its header, its size, and its one-byte tensors."""
    head = file.read(0, FIRST_PIECE)
    length = int.from_bytes(head[:8], "little")
    end = min(8 + length, 8 + MAX_HEADER_BYTES)
    if len(head) < end:
        head += file.read(len(head), end)
    with path.open("wb") as out:
        out.write(head[:end])
        for offset in _single_bytes(head[8:end], file.size):
            out.seek(end + offset)
            out.write(file.read(end + offset, end + offset + 1))
        out.truncate(file.size)


def _single_bytes(header: bytes, limit: int) -> list[int]:
    """Offsets of one-byte tensors, which are flags; a damaged header has none."""
    try:
        entries = parse_json(header, "header")
    except ConvertError:
        return []
    if not isinstance(entries, dict):
        return []
    spans = [e.get("data_offsets") for e in entries.values() if isinstance(e, dict)]
    return [
        s[0]
        for s in spans
        if isinstance(s, list) and len(s) == 2 and all(map(is_natural, s))
        if s[1] == s[0] + 1 and s[0] < limit
    ][:16]


def _is_an_answer(error: Exception) -> bool:
    """True when the hub itself refused, as opposed to a hub that cannot be reached."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and 400 <= status < 500


def _cached_checkpoint(repo: str, revision: str | None) -> HubSource | None:
    """The snapshot in the local cache, if it holds weights."""
    try:
        where = _snapshot(repo, revision, cached=True)
    except Exception:  # its types differ between versions; the first error says more
        return None
    directory = Path(where)
    whole = any(directory.glob("*.safetensors"))
    return HubSource(repo, directory.name, directory) if whole else None


def fetch_headers(repo: str, revision: str | None, scratch: Path) -> HubSource:
    """As fetch_checkpoint, but of weights that are not cached only the headers are fetched.

    The files in `scratch` have their true sizes and no data: enough for a plan.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with _hub_errors(f"hub repository {repo!r}"):
        try:
            info = HfApi().model_info(repo, revision=revision)
        except Exception as error:
            if _is_an_answer(error) or not (found := _cached_checkpoint(repo, revision)):
                raise
            return found
        names = [s.rfilename for s in info.siblings or [] if "/" not in s.rfilename]
        for name in (n for n in names if any(fnmatch(n, p) for p in PATTERNS)):
            cached = cached_file(repo, name, info.sha)
            if cached is None and name.endswith(".json"):
                cached = Path(hf_hub_download(repo, name, revision=info.sha))
            if cached is not None:
                (scratch / name).symlink_to(cached)
            else:
                _skeleton(RemoteFile(repo, name, info.sha), scratch / name)
    return HubSource(repo, info.sha or "", scratch)
