"""Training data: what the quantized target says to the prompts, and what it holds while saying it.

Two stages, both resumable, both appending to a folder outside the repository:

    python -m demo_pair.collect say  --server URL --out DIR     continuations, by llama-server
    python -m demo_pair.collect read --target GGUF --out DIR    tapped rows, top logits, by prefill

A continuation is greedy or sampled (temperature 1, top_p 0.95, top_k 20). The second stage runs
prompt and continuation through the library once and writes, a token:

    tokens.bin  int32            taps.bin    float16 [taps * hidden]
    top_ids.bin int32 [32]       top_lp.bin  float16 [32]   log-probabilities of the next token

and `index.jsonl`, a line a sequence: where it starts, its length, where the prompt ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from demo_pair.prompts import Prompt, held_out, training_prompts
from demo_pair.texts import Text, texts_of

# Outputs of these target layers, early to late. The last one (29) is not published by llama.cpp.
TARGET_LAYER_IDS = (2, 9, 16, 23, 28)
TOP = 32
SAMPLED_SHARE = 0.35


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    sampled: bool
    seed: int


def note(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def requests_for(count: int, seed: int) -> Iterator[Request]:
    """One continuation a prompt; every category has the same share of sampled ones."""
    for i, prompt in enumerate(training_prompts(count, seed)):
        yield Request(prompt, (i * 0.618033988749895) % 1.0 < SAMPLED_SHARE, seed * 1_000_000 + i)


async def ask(client: httpx.AsyncClient, request: Request, n_predict: int) -> Text:
    """The target's continuation of one prompt under its chat template."""
    messages = [{"role": "user", "content": request.prompt.text}]
    shaped = (await client.post("/apply-template", json={"messages": messages})).json()["prompt"]
    body = {"content": shaped, "add_special": True, "parse_special": True}
    ids = (await client.post("/tokenize", json=body)).json()["tokens"]
    # The chain is named in full: the server's default would apply penalties and min_p as well.
    options: dict[str, Any] = {"samplers": ["top_k", "temperature"], "top_k": 1}
    if request.sampled:
        chain = ["top_k", "top_p", "temperature"]
        options = {"samplers": chain, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    body = {
        "prompt": ids,
        "n_predict": n_predict,
        "return_tokens": True,
        "cache_prompt": False,
        "seed": request.seed,
        **options,
    }
    reply = (await client.post("/completion", json=body)).json()
    return Text(request.prompt.category, request.sampled, ids, reply["tokens"])


async def say(args: argparse.Namespace) -> None:
    """Append continuations to texts.jsonl, `args.parallel` at a time."""
    path: Path = args.out / "texts.jsonl"
    done = sum(1 for _ in path.open(encoding="utf-8")) if path.exists() else 0
    if args.held_out:
        todo = [Request(prompt, False, 0) for prompt in held_out()][done:]
    else:
        todo = list(requests_for(args.count, args.seed))[done:]
    queue = iter(enumerate(todo))
    finished: dict[int, Text] = {}  # of which an earlier one is still missing
    written = total = 0
    with path.open("a", encoding="utf-8") as out:
        async with httpx.AsyncClient(base_url=args.server, timeout=3600) as client:

            async def worker() -> None:
                nonlocal total, written
                for number, request in queue:
                    text = await ask(client, request, args.n_predict)
                    finished[number] = text
                    while written in finished:  # in order, so that a run can be taken up
                        out.write(json.dumps(asdict(finished.pop(written))) + "\n")
                        written += 1
                    out.flush()
                    total += len(text.continuation)
                    if (total // 1000) % 5 == 0:
                        note(f"{total} tokens")

            await asyncio.gather(*(worker() for _ in range(args.parallel)))


def top_logprobs(
    logits: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
    """The `TOP` likeliest next tokens of each row, best first, with their log-probabilities."""
    peak = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - peak).sum(axis=1, keepdims=True)) + peak
    ids = np.argpartition(-logits, TOP, axis=1)[:, :TOP]
    values = np.take_along_axis(logits, ids, axis=1) - total
    order = np.argsort(-values, axis=1)
    best = np.take_along_axis(ids, order, axis=1).astype(np.int32)
    return best, np.take_along_axis(values, order, axis=1).astype(np.float16)


class Store:
    """The flat files of the second stage; a sequence counts once its index line is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = folder / "index.jsonl"
        lines = self.index.read_text(encoding="utf-8").splitlines() if self.index.exists() else []
        self.sequences = len(lines)
        last = json.loads(lines[-1]) if lines else {"start": 0, "length": 0}
        self.rows = last["start"] + last["length"]

    def append(self, text: Text, arrays: dict[str, npt.NDArray[Any]]) -> None:
        length = len(text.prompt) + len(text.continuation)
        for name, rows in arrays.items():
            array = np.ascontiguousarray(rows)
            with (self.folder / f"{name}.bin").open("ab") as file:
                # An interrupted run may have left a longer file than the index knows.
                file.truncate(self.rows * array[0].nbytes)
                file.write(array.tobytes())
        line = {
            "start": self.rows,
            "length": length,
            "prompt": len(text.prompt),
            "category": text.category,
            "sampled": text.sampled,
        }
        with self.index.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.rows += length
        self.sequences += 1


def read(args: argparse.Namespace) -> None:
    """Prefill every text and store what training needs of the target."""
    from dspine import Pair, PairOptions  # the native library is needed only here

    store = Store(args.out)
    options = PairOptions(n_ctx=2048, n_batch=2048, n_ubatch=512, n_threads=args.threads)
    with Pair(args.target, None, options) as pair:
        pair.set_taps([layer + 1 for layer in TARGET_LAYER_IDS])
        for text in islice(texts_of(args.out / "texts.jsonl"), store.sequences, None):
            ids = np.array(text.prompt + text.continuation, np.int32)
            pair.truncate(0, 0)
            pair.target_decode(0, ids, 0)
            top_ids, top_lp = top_logprobs(pair.target_logits())
            taps = pair.target_taps().astype(np.float16)
            arrays: dict[str, npt.NDArray[Any]] = {
                "tokens": ids,
                "taps": taps,
                "top_ids": top_ids,
                "top_lp": top_lp,
            }
            store.append(text, arrays)
            if store.sequences % 20 == 0:
                note(f"{store.sequences} sequences, {store.rows} tokens")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("say", "read"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--n-predict", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held-out", action="store_true", help="the evaluation's prompts instead")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "say":
        asyncio.run(say(args))
    else:
        read(args)


if __name__ == "__main__":
    main()
