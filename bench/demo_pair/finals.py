"""The target's normed last rows of collected text, which training imitates.

    python -m demo_pair.finals --target GGUF --data DIR [DIR ..]

The last tap is the output of the last layer but one, so one layer over a whole sequence gives
what the target's head reads. `finals.bin` (float16 [hidden], a token) stands beside the taps;
sequences that were added since the last run are appended.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from demo_pair.collect import TARGET_LAYER_IDS, note
from demo_pair.data import HIDDEN, Corpus
from demo_pair.teacher import Teacher


def complete(folder: Path, teacher: Teacher) -> int:
    """Append what `finals.bin` lacks; returns the number of its rows."""
    corpus = Corpus([folder], len(TARGET_LAYER_IDS) * HIDDEN)
    path = folder / "finals.bin"
    row_bytes = 2 * HIDDEN
    done = path.stat().st_size // row_bytes if path.exists() else 0
    with path.open("ab") as out:
        for seq in corpus.sequences:
            if seq.start + seq.length <= done:
                continue
            # An interrupted run may have left a part of this sequence.
            out.truncate(seq.start * row_bytes)
            last_tap = np.array(corpus.rows(seq, "taps")[:, -HIDDEN:])
            rows = teacher.finish(torch.from_numpy(last_tap)).half().numpy()
            out.write(rows.tobytes())
            done = seq.start + seq.length
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    teacher = Teacher(args.target, TARGET_LAYER_IDS)
    for folder in args.data:
        note(f"{folder}: {complete(folder, teacher)} rows")


if __name__ == "__main__":
    main()
