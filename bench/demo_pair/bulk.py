"""Training text in bulk: PyTorch continues many prompts at once, then reads what was written.

    python -m demo_pair.bulk prepare --server URL --out FILE           prompts as token ids
    python -m demo_pair.bulk write --target GGUF --prompts FILE --out DIR --shard 0/2
    python -m demo_pair.bulk pack --texts DIR/texts.jsonl .. --out TEXTS.npz
    python -m demo_pair.bulk read --target GGUF --texts TEXTS.npz --out DIR --shard 0/2
    python -m demo_pair.bulk compare --target GGUF --out DIR           with the library

Half of the prompts are templates; of the others only the opening is given, and the target writes
the rest of the question itself, at temperature 1, before it answers. All sequences of a wave stand
at the same position, prompts included. `write` leaves texts.jsonl, and what the target held while
writing it; `read` finds that again for packed texts. These are the files of `collect.py read`, and
`finals.bin`, float16 [hidden] a token: the target's normed last rows, which training imitates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demo_pair.collect import SAMPLED_SHARE, TARGET_LAYER_IDS, TOP, Store, note
from demo_pair.data import HIDDEN, Corpus
from demo_pair.prompts import Prompt, held_out, openings, training_prompts
from demo_pair.teacher import Cache, Reading, Teacher
from demo_pair.texts import Text, pack, texts_of

TOP_K, TOP_P = 20, 0.95
END = 2  # <|im_end|>
QUESTION_LIMIT = 64
DROP_EVERY = 8  # steps between two looks at who is done
GROW = 64  # positions that the cache grows by
T = TypeVar("T")
PROGRESS = "progress.json"  # waves that stand whole, and their sequences
ASKED = 32  # prompts that are tokenized at a time
PREFILL = 16  # sequences in one pass over their prompts
# What stands between question and answer in the chat format: <|im_end|>\n<|im_start|>assistant\n
TURN = (2, 198, 1, 520, 9531, 198)


@dataclass(frozen=True)
class Start:
    """A prompt as token ids; `open`: the target finishes the question first."""

    category: str
    sampled: bool
    open: bool
    ids: list[int]


@dataclass
class Slot:
    start: Start
    tokens: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    answer_at: int = 0  # 0 while the question is being written
    done: bool = False
    read: bool = False  # the last token too

    def next(self, greedy: int, drawn: int, limit: int) -> None:
        """Take the next token: a given one, else the target's."""
        asking = not self.answer_at
        if not self.forced and asking and len(self.tokens) - len(self.start.ids) >= QUESTION_LIMIT:
            drawn = END
        sampled = self.start.sampled or asking
        token = self.forced.pop(0) if self.forced else drawn if sampled else greedy
        self.tokens.append(token)
        if self.forced:
            return
        if asking and token == END:
            self.forced = list(TURN[1:])
            self.answer_at = len(self.tokens) + len(TURN) - 1
        elif not asking and len(self.tokens) > self.answer_at:
            self.done = token == END or len(self.tokens) - self.answer_at >= limit


def begin(start: Start, given: int) -> Slot:
    """`given` tokens of the prompt stand already; the others follow one a step."""
    rest = start.ids[given:]
    answer_at = 0 if start.open else len(start.ids)
    return Slot(start, list(start.ids[:given]), rest, answer_at)


def draw(top_lp: Tensor, generator: torch.Generator) -> Tensor:
    """Indices [b] into the top_k likeliest tokens, at temperature 1 and after top_p."""
    p = top_lp.exp()
    p = p / p.sum(dim=-1, keepdim=True)
    p = p * (p.cumsum(dim=-1) - p < TOP_P)
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def arrays_of(ids: Tensor, found: Reading, row: int) -> dict[str, npt.NDArray[Any]]:
    """The files' contents for ids [t], which begin sequence `row` of the reading."""
    columns = {
        "taps": found.taps,
        "top_ids": found.top_ids.int(),
        "top_lp": found.top_lp.half(),
        "finals": found.finals,
    }
    kept = {name: column[row, : len(ids)].numpy() for name, column in columns.items()}
    return {"tokens": ids.int().numpy(), **kept}


class Wave:
    """Sequences that started together. Rows of finished ones are dropped now and then."""

    def __init__(self, teacher: Teacher, starts: list[Start], limit: int, seed: int) -> None:
        self.teacher, self.limit = teacher, limit
        self.given = min(len(s.ids) for s in starts)
        self.slots = [begin(s, self.given) for s in starts]
        self.rows = list(range(len(starts)))  # slots of the cache's rows
        self.generator = torch.Generator().manual_seed(seed)
        longest = max(len(s.ids) for s in starts) + QUESTION_LIMIT + len(TURN) + limit
        self.held = empty_reading(len(starts), longest + DROP_EVERY)

    def run(self) -> None:
        cache = Cache(len(self.rows), self.given + GROW)
        self.prefill(cache)
        pos = self.given - 1
        while self.rows:
            if pos == cache.length:
                cache.grow(pos + GROW)
            self.one_step(pos, cache)
            pos += 1
            if pos % DROP_EVERY:
                continue
            live = [i for i, r in enumerate(self.rows) if not self.slots[r].read]
            if len(live) < 0.9 * len(self.rows):
                cache.keep(torch.tensor(live, dtype=torch.long))
                self.rows = [self.rows[i] for i in live]

    def prefill(self, cache: Cache) -> None:
        """All given positions but the last, a few sequences at a time."""
        count = self.given - 1
        for first in range(0, len(self.rows) if count else 0, PREFILL):
            rows = self.rows[first : first + PREFILL]
            ids = torch.tensor([self.slots[r].tokens[:count] for r in rows])
            part = Cache(len(ids), count)
            self.hold(rows, 0, self.teacher.read(ids, 0, part, TOP))
            cache.fill(first, part)

    def hold(self, rows: list[int], pos: int, found: Reading) -> None:
        """Keep what was read of these slots from position `pos` on."""
        places = slice(pos, pos + found.taps.shape[1])
        for name, column in vars(self.held).items():
            column[rows, places] = getattr(found, name).to(column.dtype)

    def one_step(self, pos: int, cache: Cache) -> None:
        ids = torch.tensor([self.slots[r].tokens[pos] for r in self.rows])
        found = self.teacher.read(ids[:, None], pos, cache, TOP)
        self.hold(self.rows, pos, found)
        top_ids, top_lp = found.top_ids[:, 0, :TOP_K], found.top_lp[:, 0, :TOP_K]
        drawn = top_ids.gather(1, draw(top_lp, self.generator)[:, None])[:, 0].tolist()
        for row, greedy, other in zip(self.rows, top_ids[:, 0].tolist(), drawn, strict=True):
            slot = self.slots[row]
            if not slot.done:
                slot.next(greedy, other, self.limit)
            else:
                slot.read = True
                slot.tokens.append(END)  # a row that waits to be dropped

    def texts(self) -> Iterator[tuple[Text, dict[str, npt.NDArray[Any]]]]:
        """What was written, and what the target held over it."""
        for row, slot in enumerate(self.slots):
            end = slot.answer_at + self.limit
            tokens = slot.tokens[: min(end, len(slot.tokens))]
            if END in tokens[slot.answer_at :]:
                tokens = tokens[: tokens.index(END, slot.answer_at) + 1]
            prompt, answer = tokens[: slot.answer_at], tokens[slot.answer_at :]
            text = Text(slot.start.category, slot.start.sampled, prompt, answer)
            yield text, arrays_of(torch.tensor(tokens), self.held, row)


def empty_reading(sequences: int, length: int) -> Reading:
    shape = (sequences, length)
    return Reading(
        torch.zeros(*shape, len(TARGET_LAYER_IDS) * HIDDEN, dtype=torch.half),
        torch.zeros(*shape, HIDDEN, dtype=torch.half),
        torch.zeros(*shape, TOP, dtype=torch.int32),
        torch.zeros(*shape, TOP, dtype=torch.half),
    )


def waves(starts: list[Start], pool: int, batch: int) -> Iterator[list[Start]]:
    """Prompts of about one length together: nobody waits for the longest."""
    for first in range(0, len(starts), pool):
        some = sorted(starts[first : first + pool], key=lambda s: len(s.ids))
        yield from (some[i : i + batch] for i in range(0, len(some), batch))


def resume(out: Path) -> int:
    """Number of waves that stand whole in the folder; what an interrupted one left is cut off."""
    texts, index, progress = (out / name for name in ("texts.jsonl", "index.jsonl", PROGRESS))
    if index.exists() and not texts.exists():
        raise SystemExit(f"{out}: holds what `bulk.py read` found, expected an empty folder")
    done, sequences = json.loads(progress.read_text()) if progress.exists() else (0, 0)
    for path in (texts, index):
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
        if len(lines) < sequences:
            raise SystemExit(f"{path}: {len(lines)} lines, {PROGRESS} tells of {sequences}")
        replace_text(path, "".join(lines[:sequences]))
    return int(done)


def replace_text(path: Path, text: str) -> None:
    """In one step, whatever interrupts it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write(args: argparse.Namespace) -> None:
    """Append the continuations of a share of the prompts, and what the target held over them."""
    teacher = Teacher(args.target, TARGET_LAYER_IDS)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    forbidden = {tuple(ids) for ids in json.loads(lines[0])}
    starts = [Start(**json.loads(line)) for line in share(args, lines[1:])]
    done = resume(args.out)
    store = Store(args.out)
    for number, some in enumerate(waves(starts, args.pool, args.batch)):
        if number < done:
            continue
        began = time.monotonic()
        wave = Wave(teacher, some, args.n_predict, number * 100 + int(args.shard.split("/")[0]))
        wave.run()
        with (args.out / "texts.jsonl").open("a", encoding="utf-8") as out:
            for text, arrays in wave.texts():
                if tuple(text.prompt) not in forbidden and len(text.continuation) > 2:
                    out.write(json.dumps(asdict(text)) + "\n")
                    store.append(text, arrays)
        replace_text(args.out / PROGRESS, json.dumps([number + 1, store.sequences]))
        spoken = sum(len(s.tokens) - s.answer_at for s in wave.slots)
        rate = spoken / (time.monotonic() - began)
        note(f"wave {number + 1}: {spoken} new tokens, {rate:.0f} a second")


def share(args: argparse.Namespace, items: Iterable[T]) -> Iterator[T]:
    shard, shards = map(int, args.shard.split("/"))
    return islice(items, shard, None, shards)


def all_texts(args: argparse.Namespace) -> Iterator[Text]:
    return chain.from_iterable(texts_of(path) for path in args.texts)


def read(args: argparse.Namespace) -> None:
    """Store what the target holds over a share of the texts; resumable."""
    teacher, store = Teacher(args.target, TARGET_LAYER_IDS), Store(args.out)
    for text in islice(share(args, all_texts(args)), store.sequences, None):
        ids = torch.tensor(text.prompt + text.continuation)
        found = teacher.read(ids[None], 0, Cache(1, len(ids)), TOP)
        store.append(text, arrays_of(ids, found, 0))
        if store.sequences % 100 == 0:
            note(f"{store.sequences} sequences, {store.rows} tokens")


def compare(args: argparse.Namespace) -> None:
    """How often the quantized target itself chooses what was stored, over some sequences."""
    from dspine import Pair, PairOptions  # the native library is needed only here

    corpus = Corpus([args.out], len(TARGET_LAYER_IDS) * HIDDEN)
    same = tokens = 0
    error = scale = 0.0
    with Pair(args.target, None, PairOptions(n_ctx=1024, n_batch=1024, n_threads=1)) as pair:
        pair.set_taps([layer + 1 for layer in TARGET_LAYER_IDS])
        for seq in corpus.sequences[:: max(len(corpus.sequences) // args.count, 1)]:
            pair.truncate(0, 0)
            pair.target_decode(0, np.array(corpus.rows(seq, "tokens")), 0)
            places = slice(seq.prompt - 1, seq.length - 1)
            ours = corpus.rows(seq, "top_ids")[places, 0]
            same += int((pair.target_logits()[places].argmax(axis=1) == ours).sum())
            tokens += len(ours)
            taps, theirs = corpus.rows(seq, "taps")[places].astype(np.float32), pair.target_taps()
            error += float(np.square(taps - theirs[places]).sum())
            scale += float(np.square(theirs[places]).sum())
    report = {"tokens": tokens, "same_choice": round(same / tokens, 4)}
    note(json.dumps(report | {"taps_relative_error": round((error / scale) ** 0.5, 4)}))


async def prepare(args: argparse.Namespace) -> None:
    """Token ids of the prompts, held-out ones (which no run may meet) in the first line."""
    async with httpx.AsyncClient(base_url=args.server, timeout=60) as client:

        async def shape(content: str) -> str:
            body = {"messages": [{"role": "user", "content": content}]}
            return str((await client.post("/apply-template", json=body)).json()["prompt"])

        async def ids_of(text: str) -> list[int]:
            body = {"content": text, "add_special": True, "parse_special": True}
            ids: list[int] = (await client.post("/tokenize", json=body)).json()["tokens"]
            return ids

        forbidden = [await ids_of(await shape(prompt.text)) for prompt in held_out()]
        wanted: list[tuple[Prompt, bool]] = []
        for whole, opening in zip(
            training_prompts(args.count, args.seed, args.own),
            openings(args.count, args.seed),
            strict=True,
        ):
            wanted += [(whole, False), (opening, True)]

        async def start_of(i: int) -> Start:
            prompt, is_open = wanted[i]
            text = await shape(prompt.text)
            if is_open:
                text = text[: text.rindex(prompt.text) + len(prompt.text)]
            sampled = (i * 0.618033988749895) % 1.0 < SAMPLED_SHARE
            return Start(prompt.category, sampled, is_open, await ids_of(text))

        with args.out.open("w", encoding="utf-8") as out:
            out.write(json.dumps(forbidden) + "\n")
            for first in range(0, len(wanted), ASKED):
                some = range(first, min(first + ASKED, len(wanted)))
                for start in await asyncio.gather(*map(start_of, some)):
                    if len(start.ids) <= args.longest:
                        out.write(json.dumps(asdict(start)) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("prepare", "write", "pack", "read", "compare"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    parser.add_argument("--count", type=int, default=6000, help="templates, and as many openings")
    parser.add_argument("--longest", type=int, default=320, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own", action="store_true", help="prompts without others' text")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("--n-predict", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.stage == "prepare":
        asyncio.run(prepare(args))
    elif args.stage == "pack":
        note(f"{pack(args.out, all_texts(args))} tokens")
    elif args.stage in ("write", "read"):
        args.out.mkdir(parents=True, exist_ok=True)
        {"write": write, "read": read}[args.stage](args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
