"""Curves of a training run: log.json to a PNG."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend must be chosen first


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    """Losses of the training batches, and mean accepted length on held-out text."""
    steps = [e for e in entries if "loss" in e]
    checks = [e for e in entries if e.get("held_out")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name in ("ce", "ce_refined", "l1", "l1_refined", "align"):
        left.plot([e["step"] for e in steps], [e[name] for e in steps], label=name)
    left.set(xlabel="step", ylabel="loss, weighted over rows", yscale="log")
    left.legend()
    for name in sorted(checks[-1]["held_out"]) if checks else []:
        points = [e for e in checks if name in e["held_out"]]
        style = {"color": "black", "linewidth": 2.5} if name == "all" else {"alpha": 0.7}
        values = [e["held_out"][name] for e in points]
        right.plot([e["step"] for e in points], values, label=name, marker="o", **style)
    right.axhline(1.0, color="grey", linestyle=":")
    right.set(xlabel="step", ylabel="mean accepted length, replayed greedily")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.log.read_text(encoding="utf-8"))["log"], args.png)


if __name__ == "__main__":
    main()
