"""The conversion as a function: options in, plan and written paths out."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dspine_convert import hub
from dspine_convert.checkpoint import Checkpoint, open_checkpoint, read_json
from dspine_convert.config import load_config
from dspine_convert.errors import ConvertError, short
from dspine_convert.fold import fold
from dspine_convert.names import is_codes, is_reference_pair, resolve
from dspine_convert.plan import OutputType, Plan, Provenance, build_plan, check_ready
from dspine_convert.progress import meter
from dspine_convert.quantize import PLAIN, load_quantizer
from dspine_convert.stream import Run, source_bytes, stream
from dspine_convert.target import Target, from_header, load_gguf, load_hf_directory
from dspine_convert.verify import FileReport, verify_bytes, verify_file
from dspine_convert.write import Pending, background_flush, check_outputs, commit, pending_outputs


@dataclass(frozen=True)
class Options:
    """Everything a run depends on."""

    source: str
    target: str
    types: tuple[OutputType, ...] = (OutputType.BF16,)
    directory: Path = Path()
    codes: Path | None = None
    config: Path | None = None
    tensor_map: Path | None = None
    name: str | None = None
    revision: str | None = None
    target_revision: str | None = None
    threads: int | None = None
    force: bool = False
    fold: bool = False
    verify: bool = False
    dry_run: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Result:
    """A finished run; `paths` is empty after a dry run."""

    plan: Plan
    paths: list[Path] = field(default_factory=list)
    reports: list[FileReport] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """The checkpoint on disk: its directory or file, and where it came from."""

    path: Path
    provenance: Provenance


def _file_stem(text: str) -> str:
    """A name that is safe in a file name."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "drafter"


def find_source(options: Options, stack: ExitStack) -> Source:
    """Find SRC on disk, or fetch it from the hub; for a dry run its headers only."""
    path = Path(options.source)
    if os.path.lexists(path):
        # Not resolve(): a link keeps the name that the user gave it.
        absolute = Path(os.path.abspath(path))  # noqa: PTH100
        directory = absolute if absolute.is_dir() else absolute.parent
        repo, revision = hub.snapshot_identity(directory) or (None, None)
        plain = absolute.is_dir() or absolute.name == "model.safetensors"
        name = repo.split("/")[-1] if repo else directory.name if plain else absolute.stem
        return Source(path, Provenance(_file_stem(options.name or name), repo, revision))
    if hub.REPO_ID.fullmatch(options.source):
        if options.dry_run and not hub.is_offline():
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dspine-plan-"))
            found = hub.fetch_headers(options.source, options.revision, Path(scratch))
        else:
            found = hub.fetch_checkpoint(options.source, options.revision)
        name = options.name or found.repo.split("/")[-1]
        return Source(found.directory, Provenance(_file_stem(name), found.repo, found.revision))
    raise ConvertError(f"{options.source}: no such file or directory, and not a hub repository id")


def find_config(source: Path, explicit: Path | None) -> Path:
    """The config file: as given, or beside the weights."""
    if explicit is not None:
        return explicit
    places = (
        [source / "config.json"]
        if source.is_dir()
        else [
            source.parent / "config.json",
            source.with_suffix(".json"),
        ]
    )
    for place in places:
        if os.path.lexists(place):
            return place
    listed = ", ".join(map(str, places))
    raise ConvertError(f"no config.json; looked at {listed}; --config FILE names one elsewhere")


def find_target(options: Options) -> tuple[Target, Path | None]:
    """The target's facts, and its file where it is a local GGUF."""
    path = Path(options.target)
    if path.is_dir():
        return load_hf_directory(path), None
    if os.path.lexists(path):
        return load_gguf(path), path
    if match := hub.REPO_FILE.fullmatch(options.target):
        repo, name = match["repo"], match["file"]
        cached = hub.cached_file(repo, name, options.target_revision)
        if cached is not None:
            return load_gguf(cached), cached
        header = hub.read_remote_header(repo, name, options.target_revision)
        return from_header(header, options.target), None
    raise ConvertError(
        f"--target {options.target}: no such GGUF file or directory, "
        "and not of the form repo_id:file.gguf"
    )


def read_tensor_map(path: Path | None) -> dict[str, str]:
    """The explicit map from source names to canonical names."""
    if path is None:
        return {}
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise ConvertError(f"{path}: expected a JSON object of source name to canonical name")
    return content


def _check_codes(codes: Path | None, checkpoint: Checkpoint) -> None:
    """Refuse --codes where the weights hold codes already: which of the two were trained with?"""
    if codes is None:
        return
    for tensor in checkpoint.tensors.values():
        if tensor.path != codes and is_codes(tensor.name):
            raise ConvertError(
                f"--codes {codes}: {tensor.path.name} holds codes already, as "
                f"{short(tensor.name)!r}; leave --codes out, or give weights without codes"
            )


def make_plan(options: Options, stack: ExitStack) -> tuple[Plan, list[Path]]:
    """Read all headers and plan; also returns the input files. Files stay open in `stack`."""
    source = find_source(options, stack)
    checkpoint = open_checkpoint(source.path, options.codes, stack)
    _check_codes(options.codes, checkpoint)
    apart = options.codes is not None or is_reference_pair(list(checkpoint.tensors))
    config_path = find_config(source.path, options.config)
    config = load_config(config_path, reference_pair=apart)
    explicit = read_tensor_map(options.tensor_map)
    resolution, ready = resolve(checkpoint.tensors, config, explicit)
    if options.fold:
        resolution = fold(resolution)
    ready_notes = check_ready(ready, reference_pair=config.reference_pair)
    target, target_path = find_target(options)
    plan = build_plan(config, resolution, target, source.provenance, options.types)
    plan = Plan(plan.files, plan.dropped, (*plan.notes, *ready_notes))
    extra = (target_path, options.tensor_map)
    return plan, [*checkpoint.files, config_path, *(p for p in extra if p is not None)]


def default_threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(
    options: Options,
    announce: Callable[[Plan], None] = lambda plan: None,
    written: list[Path] | None = None,
) -> Result:
    """Plan, and unless it is a dry run, convert; `announce` sees the plan before any writing.

    Raises ConvertError for every refusal, OSError when the system fails; in both cases, and on
    an interrupt, nothing is left behind but the finished files that `written` then lists.
    """
    written = [] if written is None else written
    with ExitStack() as stack:
        plan, inputs = make_plan(options, stack)
        if options.dry_run:
            return Result(plan)
        check_outputs(plan, options.directory, inputs, force=options.force)
        plain = all(t.info.type in PLAIN for f in plan.files for t in f.tensors)
        work = Run(None if plain else load_quantizer(), meter("", 0, quiet=True))
        announce(plan)
        pending = stack.enter_context(pending_outputs(plan, options.directory))
        _convert(plan, pending, work, options)
        reports = _verify(plan, pending, options) if options.verify else []
        commit(pending, written, force=options.force)
    return Result(plan, written, reports)


def _convert(plan: Plan, pending: tuple[Pending, ...], work: Run, options: Options) -> None:
    threads = options.threads or default_threads()
    with meter("converting", source_bytes(plan), quiet=options.quiet) as shown:
        work.meter = shown
        with background_flush(pending):
            stream(plan, tuple(p.fd for p in pending), work, threads)


def _verify(plan: Plan, pending: tuple[Pending, ...], options: Options) -> list[FileReport]:
    threads = options.threads or default_threads()
    reports: list[FileReport] = []
    with meter("verifying", verify_bytes(plan), quiet=options.quiet) as shown:
        for item in pending:
            found = verify_file(item.planned, item.temporary, item.fd, shown, threads)
            reports.append(FileReport(item.final, found.worst))
    return reports
