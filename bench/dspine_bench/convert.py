"""Our converter against the route that llama.cpp offers, on the 27B drafter shape.

The peer writes BF16 with a plain gguf-py script and runs the pinned llama-quantize twice; ours
writes the same three files from one read of the checkpoint. Runs are interleaved, so that a
noisy machine disturbs both; the result is the ratio of the medians.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer

from dspine_bench.golden_target import LAYER_NAMES
from dspine_bench.synthetic import Shape, write_checkpoint, write_target_header

# published sizes in bytes, and how far ours may be from them
PUBLISHED = {"BF16": 4.06e9, "Q8_0": 2.20e9, "Q4_K_M": 1.26e9}
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


@dataclass(frozen=True)
class Leg:
    """One timed process: wall seconds and peak resident bytes."""

    seconds: float
    peak_rss: int


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


def _timed(command: list[str]) -> Leg:
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    text = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {text.decode(errors='replace')[-2000:]}")
    return Leg(time.perf_counter() - begin, usage.ru_maxrss * 1024)


def _ours(drafter: Path, target: Path, out: Path) -> tuple[Leg, dict[str, int]]:
    types = [word for t in ("bf16", "q8_0", "q4_k_m") for word in ("-t", t)]
    command = [sys.executable, "-m", "dspine_convert", str(drafter), "--target", str(target)]
    leg = _timed([*command, *types, "-o", str(out), "--force"])
    sizes = {t: next(out.glob(f"*-{t}.gguf")).stat().st_size for t in PUBLISHED}
    return leg, sizes


def _peer(drafter: Path, quantize: Path, out: Path) -> list[Leg]:
    bf16 = out / "peer-BF16.gguf"
    module = [sys.executable, "-m", "dspine_bench.convert", "plain"]
    legs = [_timed([*module, str(drafter / "model.safetensors"), str(bf16)])]
    for kind in ("Q8_0", "Q4_K_M"):
        legs.append(_timed([str(quantize), str(bf16), str(out / f"peer-{kind}.gguf"), kind]))
    return legs


app = typer.Typer(add_completion=False, help=__doc__)


@app.command("plain")
def plain(source: Path, out: Path) -> None:
    """Write the peer's BF16 file (used by `run`)."""
    write_plain_bf16(source, out)


@app.command("run")
def run(
    quantize: Annotated[Path, typer.Option(help="the pinned llama-quantize")],
    folder: Annotated[Path | None, typer.Option(help="where the checkpoint lies or goes")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    output: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """Time both routes, interleaved; exit 1 when a size, the memory or the ratio is off."""
    base = folder or Path(tempfile.mkdtemp(prefix="dspine-convert-"))
    drafter, target = base / "drafter", base / "target-header.gguf"
    if not (drafter / "model.safetensors").exists():
        write_checkpoint(drafter, Shape())
        write_target_header(target, Shape())
    out = base / "out"
    out.mkdir(exist_ok=True)

    ours: list[Leg] = []
    peers: list[list[Leg]] = []
    sizes: dict[str, int] = {}
    for _ in range(repeats):
        leg, sizes = _ours(drafter, target, out)
        ours.append(leg)
        peers.append(_peer(drafter, quantize, out))
    result = _summary(ours, peers, sizes)
    text = json.dumps(result, indent=1)
    if output:
        output.write_text(text + "\n")
    typer.echo(text)
    raise typer.Exit(0 if result["ok"] else 1)


def _summary(ours: list[Leg], peers: list[list[Leg]], sizes: dict[str, int]) -> dict[str, object]:
    mine = statistics.median(leg.seconds for leg in ours)
    theirs = statistics.median(sum(leg.seconds for leg in legs) for legs in peers)
    peak = max(leg.peak_rss for leg in ours)
    off = {t: sizes[t] / PUBLISHED[t] - 1 for t in PUBLISHED}
    return {
        "schema_version": 1,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "ours": [asdict(leg) for leg in ours],
        "peer": [[asdict(leg) for leg in legs] for legs in peers],
        "ratio": mine / theirs,
        "peak_rss": peak,
        "sizes": sizes,
        "size_error": off,
        "ok": mine / theirs <= MAX_RATIO
        and peak <= MAX_RSS
        and all(abs(e) <= SIZE_TOLERANCE for e in off.values()),
    }


if __name__ == "__main__":
    app()
