"""Random batches of several sequences with rollbacks, against one sequence at a time.

    recurrent_stress.py TARGET SEED UNIFIED

Each step adds tokens to some sequences, in shuffled order, compares the logits of every last row
with those of a fresh context, and takes back some of what a sequence added. Exit code 1 where
they differ: a sequence then got the state of another.
"""

from __future__ import annotations

import sys

import llama_cpp as ll
import numpy as np

N_SEQ, N_BACK, STEPS = 4, 7, 40
TOLERANCE = 1e-2


def context(model: object, n_seq: int, n_back: int, unified: bool) -> object:
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024 * n_seq, 1024, 256
    params.n_seq_max, params.n_rs_seq, params.kv_unified = n_seq, n_back, unified
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.type_k = params.type_v = 0  # GGML_TYPE_F32
    return ll.llama_init_from_model(model, params)


class Batch:
    """A llama_batch that is filled row by row."""

    def __init__(self) -> None:
        self.raw = ll.llama_batch_init(1024, 0, 1)

    def add(self, token: int, pos: int, seq: int, output: bool) -> int:
        row = self.raw.n_tokens
        self.raw.token[row], self.raw.pos[row] = token, pos
        self.raw.n_seq_id[row], self.raw.seq_id[row][0] = 1, seq
        self.raw.logits[row] = output
        self.raw.n_tokens = row + 1
        return row

    def decode(self, ctx: object) -> None:
        if ll.llama_decode(ctx, self.raw):
            raise SystemExit("llama_decode failed")


def logits(ctx: object, row: int, n_vocab: int) -> np.ndarray:
    return np.ctypeslib.as_array(ll.llama_get_logits_ith(ctx, row), (n_vocab,)).copy()


def expected(ctx: object, tokens: list[int], n_vocab: int) -> np.ndarray:
    ll.llama_memory_clear(ll.llama_get_memory(ctx), True)
    batch = Batch()
    for pos, token in enumerate(tokens):
        batch.add(token, pos, 0, pos + 1 == len(tokens))
    batch.decode(ctx)
    return logits(ctx, len(tokens) - 1, n_vocab)


def main(path: str, seed: int, unified: bool) -> int:
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    many, one = context(model, N_SEQ, N_BACK, unified), context(model, 1, 0, unified)
    memory = ll.llama_get_memory(many)
    rng = np.random.default_rng(seed)
    history: list[list[int]] = [[] for _ in range(N_SEQ)]
    wrong = checks = 0
    for _ in range(STEPS):
        chosen = [int(s) for s in rng.permutation(N_SEQ) if rng.random() < 0.7]
        batch, last, added = Batch(), {}, {}
        for seq in chosen:
            if history[seq] and (rng.random() < 0.15 or len(history[seq]) > 200):
                ll.llama_memory_seq_rm(memory, seq, -1, -1)
                history[seq] = []
            prompt = not history[seq]
            added[seq] = int(rng.integers(1, 60 if prompt else N_BACK + 2))
            for i in range(added[seq]):
                token = int(rng.integers(n_vocab))
                output = not prompt or i + 1 == added[seq]
                last[seq] = batch.add(token, len(history[seq]), seq, output)
                history[seq].append(token)
            if prompt:
                added[seq] = 1  # a prompt is not taken back
        if not chosen:
            continue
        batch.decode(many)
        found = {seq: logits(many, last[seq], n_vocab) for seq in chosen}
        for seq in chosen:
            checks += 1
            wrong += np.abs(found[seq] - expected(one, history[seq], n_vocab)).max() > TOLERANCE
            back = int(rng.integers(added[seq]))
            if back:
                history[seq] = history[seq][:-back]
                if not ll.llama_memory_seq_rm(memory, seq, len(history[seq]), -1):
                    raise SystemExit("llama_memory_seq_rm failed")
    sys.stdout.write(f"{wrong} of {checks} logits belong to another state\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"))
