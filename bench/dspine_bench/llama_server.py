"""llama-server as a measurement needs it: with the flags that are given, and nothing chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspine import Server


def plain_server(
    target: Path,
    draft: Path | None,
    flags: Sequence[str | Path],
    log: Path,
    executable: Path | None = None,
) -> Server:
    """A server that is not yet started; `dspine.Server` would choose caches, depth and context.

    Its requests do not use the prompt cache, so that each is measured whole.

    Args:
        flags: words of llama-server's command line.
        log: file that receives what it writes.
        executable: another llama-server than the one of the package.
    """
    return Server(
        target,
        draft,
        n_draft=None,
        n_parallel=None,
        cache_type=None,
        flash_attn=None,
        gpu_layers=None,
        extra=flags,
        log=log,
        force=True,
        defaults={"cache_prompt": False},
        executable=executable,
    )
