"""Train the drafter on collected sequences; resumable, and paced by the clock.

    python -m demo_pair.train --target TARGET.gguf --data DIR [DIR ..] --held-out DIR --run DIR

The learning rate follows the share of `--minutes` that has passed, counted over resumed runs. An
average of the weights is what is evaluated and exported.

`--workers 2` trains one copy a core, each on batches of its own, and averages the copies' weights
every `SYNC` steps: two threads of one process wait for each other at every operation, which on a
machine that does anything else costs more than it gives.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from demo_pair.data import Batch, Corpus
from demo_pair.losses import Weights, make_shortlist, objective
from demo_pair.model import Drafter, Shape, load_checkpoint, save_checkpoint
from demo_pair.offline import evaluate
from demo_pair.target import TYPE_ENV, load_target, quicker_type, split_halves

WARMUP, HOLD = 0.03, 0.55  # shares of the time: rise, then level, then fall
REPLACE_HOLD, REPLACE_END, REPLACE = 1 / 6, 1 / 3, 0.5  # predecessor replacement, as published
AVERAGE = 0.998
MOST_LEFT_OUT = 20
SAVE = 300  # seconds between two states on disk
SYNC = 5  # steps between two averages over the workers
# Short blocks first: the first rows decide the accepted length, a block's prefix is a block, and
# the same number of rows then holds more anchors. (Share of the time up to which, rows.)
ROWS = ((0.55, 4), (0.9, 8), (1.0, 16))


def note(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def whitened_codes(head: Tensor, rank: int) -> Tensor:
    """Unit rows: the centred head in its leading eigen-directions, each of unit variance."""
    centred = head - head.mean(dim=0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(head))
    leading = vectors[:, -rank:] / values[-rank:].sqrt()
    return torch.nn.functional.normalize(centred @ leading, dim=-1)


def start_from_target(drafter: Drafter, tensors: dict[str, Tensor], sources: list[int]) -> None:
    """Layers begin as copies of target layers; `fc` passes the last tap; writes begin near zero."""
    shape = drafter.shape
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    plain = {
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    state = drafter.state_dict()
    for layer, source in enumerate(sources):
        for ours, theirs in {**norms, **plain}.items():
            state[f"layers.{layer}.{ours}.weight"] = tensors[f"blk.{source}.{theirs}.weight"]
        for which, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            weight = split_halves(tensors[f"blk.{source}.attn_{which}.weight"], heads)
            state[f"layers.{layer}.self_attn.{which}_proj.weight"] = weight
        state[f"injection.writes.{layer}.weight"] *= 0.1
    state["norm.weight"] = tensors["output_norm.weight"]
    state["hidden_norm.weight"] = tensors[f"blk.{sources[-1]}.attn_norm.weight"]
    fc = state["fc.weight"] * 0.3
    fc[:, -shape.hidden :] += torch.eye(shape.hidden)
    state["fc.weight"] = fc
    state["transfer_codes"] = whitened_codes(tensors["token_embd.weight"], shape.rank)
    drafter.load_state_dict(state)


@dataclass
class Clock:
    """Training time, over all resumed runs."""

    minutes: float
    before: float = 0.0
    started: float = 0.0

    def start(self) -> None:
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    @property
    def share(self) -> float:
        return min(self.seconds / 60 / self.minutes, 1.0)

    def rate(self) -> float:
        """Multiplier of the learning rate."""
        share = self.share
        if share < WARMUP:
            return max(share / WARMUP, 0.02)
        fall = max(0.0, (share - HOLD) / (1 - HOLD))
        return 1 - 0.97 * fall

    def rows(self, block: int) -> int:
        """Rows of a training block."""
        return min(block, next(rows for end, rows in ROWS if self.share <= end))

    def replacement(self) -> float:
        """Probability of a true code in place of a predecessor's feature."""
        fall = (self.share - REPLACE_HOLD) / (REPLACE_END - REPLACE_HOLD)
        return REPLACE * (1 - min(max(fall, 0.0), 1.0))


class Trainer:
    def __init__(self, args: argparse.Namespace, rank: int = 0) -> None:
        torch.manual_seed(args.seed)
        self.args, self.rank, self.dtype = args, rank, quicker_type()
        shape = Shape(layers=len(args.sources), rank=args.rank, message=args.message)
        tensors = load_target(args.target)
        self.embed = tensors["token_embd.weight"]
        self.head = self.embed.to(self.dtype)
        self.drafter = Drafter(shape)
        start_from_target(self.drafter, tensors, args.sources)
        width = len(shape.target_layer_ids) * shape.hidden
        self.corpus = Corpus(args.data, width, with_finals=True)
        self.held_out = Corpus([args.held_out], width)
        self.optimizers = self.make_optimizers()
        if args.start:
            self.drafter.load_state_dict(load_checkpoint(args.start).state_dict())
        self.average = {k: v.clone() for k, v in self.drafter.state_dict().items()}
        self.clock = Clock(args.minutes)
        self.left_out = 0
        self.step, self.log = 0, list[dict[str, Any]]()
        self.common = self.common_tokens()
        # From here on every worker draws its own.
        self.rng = np.random.default_rng([args.seed, rank, int(time.time())])
        torch.manual_seed(args.seed + rank)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside the layers, AdamW for the rest.

        AdamW for all where bf16 is slow: torch's Muon multiplies in bf16 alone, and its step would
        take ten times as long as the rest.
        """
        muon = self.args.muon
        muon = self.dtype == torch.bfloat16 if muon is None else muon
        inner: list[Tensor] = []
        rest: list[Tensor] = []
        for name, parameter in self.drafter.named_parameters():
            matrix = parameter.ndim == 2 and (name.startswith("layers.") or name == "fc.weight")
            (inner if matrix and muon else rest).append(parameter)
        adam = torch.optim.AdamW(rest, lr=self.args.rate, betas=(0.9, 0.95), fused=True)
        made: list[torch.optim.Optimizer] = [adam]
        if inner:
            rate = self.args.muon_rate
            settings = {"adjust_lr_fn": "match_rms_adamw", "ns_steps": self.args.muon_steps}
            made.append(torch.optim.Muon(inner, lr=rate, **settings))
        return made

    def common_tokens(self, count: int = 512) -> Tensor:
        """The corpus's most frequent tokens: always in the shortlist."""
        seen = np.concatenate([part.tokens for part in self.corpus.parts])
        counts = np.bincount(seen, minlength=self.drafter.shape.vocabulary)
        return torch.from_numpy(np.argsort(-counts)[:count].copy())

    def one_pass(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        shape = self.drafter.shape
        rows = batch.labels.shape[-1] + 1
        ids = torch.full((*batch.anchors.shape, rows), shape.mask_token_id)
        ids[..., 0] = batch.anchor_tokens
        tokens = torch.cat([batch.anchor_tokens[..., None], batch.labels], dim=-1)
        # Features that are trained already need no true codes in their place.
        share = 0.0 if self.args.start else self.clock.replacement()
        where = torch.rand(tokens.shape) < share
        short = make_shortlist(batch, self.common, shape.vocabulary, 512)
        with self.autocast():
            context = self.drafter.context(batch.taps)
            block = self.drafter(
                self.embed[ids], batch.anchors, batch.anchor_tokens, context, (tokens, where)
            )
            weights = Weights(imitate=self.args.imitate * self.clock.rate())
            return objective(self.drafter, block, batch, self.head, short, weights)

    def train_step(self) -> dict[str, float]:
        rows = self.clock.rows(self.drafter.shape.block)
        # The same number of rows a step, whatever their blocks' length.
        blocks = self.args.blocks * self.drafter.shape.block // rows
        total: dict[str, float] = {}
        for _ in range(self.args.accumulate):
            batch = self.corpus.sample(self.rng, self.args.sequences, blocks, rows)
            loss, parts = self.one_pass(batch)
            (loss / self.args.accumulate).backward()
            for name, value in {"loss": float(loss.detach()), **parts}.items():
                total[name] = total.get(name, 0.0) + value / self.args.accumulate
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        if not torch.isfinite(norm):
            self.leave_out()
            return total
        for optimizer in self.optimizers:
            base = self.args.rate if optimizer is self.optimizers[0] else self.args.muon_rate
            for group in optimizer.param_groups:
                group["lr"] = base * self.clock.rate()
                group["weight_decay"] = self.args.weight_decay
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.follow()
        return total

    def leave_out(self) -> None:
        """Drop a step whose gradient is not finite: it would make all weights so, for good."""
        note(f"worker {self.rank}, step {self.step}: the gradient is not finite, left out")
        self.left_out += 1
        if self.left_out > MOST_LEFT_OUT:
            raise SystemExit(f"{self.left_out} steps without a finite gradient")
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the weights. Early ones are worth forgetting quickly."""
        keep = min(AVERAGE, self.step / (self.step + 10))
        names, values = zip(*self.drafter.named_parameters(), strict=True)
        torch._foreach_lerp_([self.average[name] for name in names], list(values), 1 - keep)

    def check(self, each: int, limit: int) -> dict[str, float]:
        """Mean accepted length of the averaged weights on held-out text; exports them."""
        save_checkpoint(self.args.run / "checkpoint", self.drafter.shape, self.average)
        self.held_out.reload()
        if not self.held_out.sequences:
            return {}
        averaged = Drafter(self.drafter.shape)
        averaged.load_state_dict(self.average)
        with self.autocast():
            found = evaluate(averaged.eval(), self.embed, self.held_out, each, limit)
        return {name: round(tally.mean_accepted_length, 4) for name, tally in found.items()}

    def save(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self.drafter.parameters()):
            raise SystemExit("the weights are not finite: the last state that was saved stays")
        state = {
            "drafter": self.drafter.state_dict(),
            "average": self.average,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.clock.seconds,
            "log": self.log,
        }
        temporary = self.args.run / "state.part"
        torch.save(state, temporary)
        temporary.replace(self.args.run / "state.pt")
        text = json.dumps({"shape": vars(self.drafter.shape), "log": self.log}, indent=1)
        (self.args.run / "log.json").write_text(text + "\n", encoding="utf-8")

    def resume(self) -> None:
        path = self.args.run / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.log = state["step"], state["log"]
        self.clock.before = state["seconds"]
        note(f"resumed at step {self.step}, {self.clock.before / 60:.1f} minutes")

    def sync(self) -> None:
        """Average the weights over the workers; the first one's clock counts for all."""
        if self.args.workers == 1:
            self.over = self.clock.share >= 1.0
            return
        parameters = list(self.drafter.parameters())
        flat = torch.cat([p.detach().flatten() for p in parameters])
        dist.all_reduce(flat)
        flat /= self.args.workers
        with torch.no_grad():
            for p, new in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.copy_(new.view_as(p))
        seconds = torch.tensor([self.clock.seconds], dtype=torch.float64)
        dist.broadcast(seconds, 0)
        self.over = float(seconds) >= self.args.minutes * 60  # for all workers alike
        self.clock.before += float(seconds) - self.clock.seconds

    def run(self) -> None:
        self.resume()
        self.over = self.clock.before >= self.args.minutes * 60
        self.clock.start()
        if self.rank == 0:
            signal.signal(signal.SIGTERM, self.stop)
        recent: list[dict[str, float]] = []
        checked = saved = self.clock.seconds
        while not self.over:
            recent.append(self.train_step())
            if self.step % SYNC == 0:
                self.sync()
            if self.step % 20 == 0:
                self.corpus.reload()
                if self.rank == 0:
                    self.report(recent)
                recent = []
            if self.rank == 0 and self.clock.seconds - checked > self.args.check_minutes * 60:
                self.conclude(3, 96)
                checked = saved = self.clock.seconds
            elif self.rank == 0 and self.clock.seconds - saved > SAVE and self.step % SYNC == 0:
                self.save()
                saved = self.clock.seconds
        if self.rank == 0:
            self.conclude(10, 128)

    def conclude(self, each: int, limit: int) -> None:
        self.log.append({"step": self.step, "held_out": self.check(each, limit)})
        note(json.dumps(self.log[-1]))
        self.save()

    def stop(self, *_: object) -> None:
        """SIGTERM between two steps or in one: keep what there is."""
        self.save()
        raise SystemExit(143)

    def report(self, recent: list[dict[str, float]]) -> None:
        mean = {k: round(sum(r[k] for r in recent) / len(recent), 4) for k in recent[0]}
        minutes = round(self.clock.seconds / 60, 2)
        line = {"step": self.step, "minutes": minutes, "tokens": self.corpus.tokens, **mean}
        self.log.append(line)
        note(json.dumps(line))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="checkpoints and log go here")
    parser.add_argument("--start", type=Path, help="a checkpoint whose weights are the first")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--check-minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--muon-rate", type=float, default=4e-3)
    parser.add_argument("--muon-steps", type=int, default=5, help="Newton-Schulz iterations")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, help="else: see the code")
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--message", type=int, default=96)
    parser.add_argument("--imitate", type=float, default=1.0, help="weight of the target's rows")
    parser.add_argument("--sources", type=int, nargs="+", default=[26, 28, 29])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of every worker")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def work(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    if args.workers > 1:
        meeting = f"file://{args.run.resolve() / 'workers'}-{os.getppid()}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.workers)
    Trainer(args, rank).run()


def main() -> None:
    args = arguments()
    args.run.mkdir(parents=True, exist_ok=True)
    # One answer for all workers: a busy core could give another.
    os.environ[TYPE_ENV] = str(quicker_type()).removeprefix("torch.")
    if args.workers == 1:
        work(0, args)
    else:
        started = mp.spawn(work, (args,), nprocs=args.workers, join=False)
        signal.signal(signal.SIGTERM, lambda *_: [p.terminate() for p in started.processes])
        while not started.join():
            pass


if __name__ == "__main__":
    main()
