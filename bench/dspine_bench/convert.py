"""Our converter against the route that llama.cpp offers, on the 27B drafter shape.

The peer writes BF16 with a plain gguf-py script and runs the pinned llama-quantize twice; ours
writes the same three files from one read of the checkpoint. Runs are interleaved, so that a
noisy machine disturbs both; the result is the ratio of the medians.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import gguf
import numpy as np
import typer
from dspine._programs import program

from dspine_bench.errors import BenchError
from dspine_bench.golden_target import LAYER_NAMES
from dspine_bench.progress import shown
from dspine_bench.provenance import build_of_library, hardware, provenance
from dspine_bench.schema import (
    MIN_REPEATS,
    ConvertReport,
    ConvertSample,
    ConvertSummary,
    Spread,
    save,
)
from dspine_bench.summary import by_pairs
from dspine_bench.synthetic import Shape, write_checkpoint, write_target_header

Side = Literal["ours", "peer"]
# published sizes in bytes, and how far ours may be from them
PUBLISHED = {"BF16": 4.06e9, "Q8_0": 2.20e9, "Q4_K_M": 1.26e9}
TYPES = tuple(PUBLISHED)
SIZE_TOLERANCE = 0.01
MAX_RSS = 1 << 30
MAX_RATIO = 0.8

GLOBAL_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "injection.message.weight": "inject_message.weight",
    "injection.receiver_gate.weight": "inject_gate_receiver.weight",
    "injection.predecessor_gate.weight": "inject_gate_predecessor.weight",
    "injection.bias": "inject_gate.bias",
    "transfer_codes": "transfer_codes.weight",
}


def _gguf_name(name: str) -> str:
    parts = name.split(".")
    if name.startswith("layers."):
        return f"blk.{parts[1]}.{LAYER_NAMES['.'.join(parts[2:-1])]}.weight"
    if name.startswith(("injection.readouts.", "injection.writes.")):
        return f"blk.{parts[2]}.inject_{parts[1].removesuffix('s')}.weight"
    return GLOBAL_NAMES[name]


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_context_length(262144)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_uint32("dflash.block_size", 16)
    writer.add_array("dflash.target_layers", [2, 14, 26, 38, 50])
    writer.add_uint32("dflash.selector_top_k", 16)
    writer.add_uint32("dflash.transfer_rank", shape.rank)
    writer.add_uint32("dflash.message_size", shape.message)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([f"<{i}>" for i in range(shape.vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocab)
    writer.add_token_merges([])


def write_plain_bf16(source: Path, out: Path) -> None:
    """What a person would write with gguf-py and nothing of ours."""
    shape = Shape()
    with source.open("rb") as f:
        n = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(n))
    data = np.memmap(source, np.uint8, "r", offset=8 + n)
    writer = gguf.GGUFWriter(out, "dflash")
    _write_metadata(writer, shape)
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            continue
        begin, end = entry["data_offsets"]
        raw = data[begin:end].view(np.uint16).reshape(entry["shape"])
        if raw.ndim == 1:
            values = (raw.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(_gguf_name(name), values)
        else:
            writer.add_tensor(
                _gguf_name(name), raw.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Runs a command and prints its seconds and peak memory in bytes. It is small itself: Linux counts
# the memory of who starts a process as that process's. It ends as the command did, by a signal too.
LAUNCHER = """
import os, subprocess, sys, time
begin = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - begin, usage.ru_maxrss * 1024)
code = os.waitstatus_to_exitcode(status)
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


def _timed(command: list[str], side: Side, step: str, repeat: int) -> ConvertSample:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, *command], capture_output=True, check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[-500:]
        raise BenchError(f"{' '.join(command)} failed ({done.returncode}): {said}")
    seconds, peak = done.stdout.split()
    return ConvertSample(
        side=side, step=step, repeat=repeat, seconds=float(seconds), peak_rss=int(peak)
    )


def _ours(drafter: Path, target: Path, out: Path, repeat: int) -> ConvertSample:
    types = [word for t in TYPES for word in ("-t", t.lower())]
    command = [sys.executable, "-m", "dspine_convert", str(drafter), "--target", str(target)]
    return _timed([*command, *types, "-o", str(out), "--force"], "ours", "all", repeat)


def _peer(drafter: Path, quantize: Path, out: Path, repeat: int) -> Iterator[ConvertSample]:
    bf16 = out / "BF16.gguf"
    module = [sys.executable, "-m", "dspine_bench.convert", "plain"]
    yield _timed([*module, str(drafter / "model.safetensors"), str(bf16)], "peer", "BF16", repeat)
    for kind in TYPES[1:]:
        made = out / f"{kind}.gguf"
        yield _timed([str(quantize), str(bf16), str(made), kind], "peer", kind, repeat)
        made.unlink()


def _both(place: Path, target: Path, quantize: Path, repeat: int) -> list[ConvertSample]:
    """A repeat; the first route changes, as the second finds the checkpoint in memory."""
    drafter = place / "drafter"
    if repeat % 2:
        peer = list(_peer(drafter, quantize, place / "peer", repeat))
        return [*peer, _ours(drafter, target, place / "ours", repeat)]
    ours = _ours(drafter, target, place / "ours", repeat)
    return [ours, *_peer(drafter, quantize, place / "peer", repeat)]


def summarize(samples: Sequence[ConvertSample], sizes: Mapping[str, int]) -> ConvertSummary:
    """Our time over the peer's: of the medians, with the extremes of single repeats.

    A side's time is that of all its steps; ValueError where a side has none.
    """
    spent: dict[str, dict[int, float]] = {"ours": {}, "peer": {}}
    for sample in samples:
        of = spent[sample.side]
        of[sample.repeat] = of.get(sample.repeat, 0.0) + sample.seconds
    ours, peer = (statistics.median(of.values()) for of in spent.values())
    single = by_pairs(spent["ours"], spent["peer"])
    ratio = ours / peer
    return ConvertSummary(
        ratio=Spread(median=ratio, min=min(ratio, *single), max=max(ratio, *single)),
        peak_rss=max(sample.peak_rss for sample in samples if sample.side == "ours"),
        size_error={name: size / PUBLISHED[name] - 1 for name, size in sizes.items()},
    )


def passes(summary: ConvertSummary) -> bool:
    """Whether time, memory and sizes are what the project promises."""
    return (
        summary.ratio.median <= MAX_RATIO
        and summary.peak_rss <= MAX_RSS
        and all(abs(error) <= SIZE_TOLERANCE for error in summary.size_error.values())
    )


def measure(
    repeats: int = MIN_REPEATS,
    folder: Path | None = None,
    quantize: Path | None = None,
    *,
    quiet: bool = True,
) -> ConvertReport:
    """Both routes in turn; files lie in a folder in `folder` (20 GB) and are removed again."""
    program_path = quantize or program("llama-quantize")
    if not program_path.is_file():
        raise BenchError(f"--quantize {program_path}: no such file")
    machine, samples = hardware(), list[ConvertSample]()
    with (
        tempfile.TemporaryDirectory(prefix="dspine-convert-", dir=folder) as place,
        shown("convert", quiet=quiet) as progress,
    ):
        root, target = Path(place), Path(place) / "target.gguf"
        progress(0, repeats, "random checkpoint")
        write_checkpoint(root / "drafter", Shape())
        write_target_header(target, Shape())
        for name in ("ours", "peer"):
            (root / name).mkdir()
        for repeat in range(repeats):
            progress(repeat, repeats, "both routes")
            samples += _both(root, target, program_path, repeat)
        progress(repeats, repeats, "")
        sizes = {t: next((root / "ours").glob(f"*-{t}.gguf")).stat().st_size for t in TYPES}
    return ConvertReport(
        schema_version=1,
        provenance=provenance(build_of_library()),
        hardware=machine,
        workload="convert",
        config={"repeats": repeats},
        sizes=sizes,
        samples=samples,
        summary=summarize(samples, sizes),
    )


app = typer.Typer(add_completion=False, help=__doc__)


@app.command("plain")
def plain(source: Path, out: Path) -> None:
    """Write the peer's BF16 file (used by `run`)."""
    write_plain_bf16(source, out)


@app.command("run")
def run(
    quantize: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: the package's llama-quantize.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For the files, 20 GB; removed again.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = MIN_REPEATS,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")
    ] = None,
) -> None:
    """Time both routes, interleaved; exit 1 when a size, the memory or the ratio is off."""
    report = measure(repeats, folder, quantize)
    if output:
        save(report, output)
    typer.echo(json.dumps(report.model_dump(mode="json"), indent=1))
    raise typer.Exit(0 if passes(report.summary) else 1)


if __name__ == "__main__":
    app()
