"""Puts the figures of results/*.json into README.md; `--check` fails where they differ.

    python -m demo_pair.report [--check]

The files are those of measure.sh. What is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspine_bench.errors import BenchError
from dspine_bench.figures import put

HERE = Path(__file__).resolve().parent
GOALS = {"all": 2.6, "code": 3.5, "json": 3.5}
PUBLISHED = "6.6-7.1 % and in a further step 8.8-10.7 %"
POSITIONS = 6
SHOWN = ("json", "code", "chat")
HEADS = ("", "goal", "prompts", "tokens", "rounds", "mean accepted length", "acceptance rate",
         "same text as the target alone")  # fmt: skip
Result = dict[str, Any]


def drafter(result: Result) -> Result:
    """What an evaluation found for its only drafter, by category."""
    (found,) = result["drafters"].values()
    return dict(found)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def share_texts(shares: list[float]) -> str:
    return ", ".join(percent(share, 0) for share in shares[:POSITIONS])


def same_text(one: Result) -> str:
    """How many texts are the target's own."""
    return f"{one['prompts'] - len(one['diverged'])} of {one['prompts']}"


def greedy_table(result: Result) -> list[str]:
    """The main table, and acceptance by position."""
    found = drafter(result)
    positions, total = found.pop("positions"), found.pop("all")
    order = sorted(found, key=lambda name: -found[name]["mean_accepted_length"])
    lines = [
        "Greedy, block 16, Q8_0 drafter, through llama-server, "
        f"{result['config']['n_predict']} tokens at most, all {total['prompts']} held-out prompts "
        "(`results/greedy_q8_0.json`). The bonus token counts: plain decoding is 1.0.",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
    ]
    for name, one in [("all", total), *((name, found[name]) for name in order)]:
        cells = [
            f"**{name}**" if name == "all" else name,
            str(GOALS.get(name, "")),
            *(str(one[key]) for key in ("prompts", "tokens", "rounds")),
            f"{one['mean_accepted_length']:.2f}",
            percent(one["acceptance_rate"]),
            same_text(one),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    both = [found[name] for name in ("code", "json")]
    length = 1 + sum(one["accepted"] for one in both) / sum(one["rounds"] for one in both)
    return [
        *lines,
        "",
        f"Code and JSON together: {length:.2f}.",
        "",
        f"- **By position** (the library's loop, the same prompts, {positions['rounds']} rounds): "
        "the first, second and further drafts are accepted in "
        f"{share_texts(positions['accepted_to_depth'])} of the rounds.",
    ]


def parts_lines(result: Result) -> list[str]:
    """What the injection and the transition cache bring."""
    modes = result["modes"]
    whole = modes["full"]["all"]["mean_accepted_length"]

    def with_drop(mode: str) -> str:
        length = modes[mode]["all"]["mean_accepted_length"]
        return f"{length:.2f} ({percent(length / whole - 1)})"

    curves = "; ".join(
        f"{name} {share_texts(modes['full'][name]['accepted_to_depth'])}" for name in SHOWN
    )
    return [
        f"- **By position and category** (PyTorch, {result['each']} prompts a category, "
        f"{result['limit']} tokens; `results/parts.json` has all): {curves}.",
        f"- **Its parts** (the same): {whole:.2f} whole, {with_drop('argmax_walk')} with the plain "
        "argmax walk in place of the transition cache, "
        f"{with_drop('no_injection')} with the injection off but the cache on. Switched off, not "
        f"trained without; the published drops, {PUBLISHED}, are of another model.",
    ]


def types_line(q8_0: Result, bf16: Result, q4_k_m: Result) -> list[str]:
    """The drafter's file types against BF16."""
    base = drafter(bf16)["all"]["mean_accepted_length"]
    texts = []
    for name, result in (("BF16", bf16), ("Q8_0", q8_0), ("Q4_K_M", q4_k_m)):
        one = drafter(result)["all"]
        length = one["mean_accepted_length"]
        change = "" if result is bf16 else f" ({100 * (length / base - 1):+.2f} %)"
        texts.append(f"{name} {length:.3f}{change}, same text {same_text(one)}")
    return [f"- **Types** (the same prompts; `results/greedy_*.json`): {'; '.join(texts)}."]


def divergence_lines(result: Result) -> list[str]:
    """Where a text leaves the target's."""
    return [
        f"- Text leaves the target's at token {one['token']} of “{one['prompt'][:60]}”, where its "
        f"two likeliest tokens are {one['margin']:.2g} apart."
        for one in drafter(result)["all"]["diverged"]
    ]


def agreement_line(result: Result) -> list[str]:
    """PyTorch against llama.cpp."""
    gaps = [f"{gap:.2g}" if gap is not None else "no candidate" for gap in result["gaps"]]
    why = f"; score gaps of the others: {', '.join(gaps)}" if gaps else ""
    return [
        f"- **PyTorch and llama.cpp** drafted the same in {result['same']} of {result['rounds']} "
        "rounds on real text of all categories, target and drafter F32 files "
        f"(`results/agreement.json`){why}."
    ]


def sampled_line(result: Result) -> list[str]:
    """Acceptance of sampled text."""
    found = drafter(result)
    total = found["all"]
    lengths = ", ".join(f"{name} {found[name]['mean_accepted_length']:.2f}" for name in SHOWN)
    return [
        f"- **Temperature 1**, top_p 0.95, top_k 20 ({total['prompts']} prompts; "
        "`results/sampled_q8_0.json`): mean accepted length "
        f"{total['mean_accepted_length']:.2f}, acceptance rate "
        f"{percent(total['acceptance_rate'])}; {lengths}."
    ]


def distribution_line(result: Result) -> list[str]:
    """The chi-square test of sampled text."""
    return [
        "- **Distribution at temperature 1** (`results/distribution.json`): a drafted token over "
        f"{result['samples']:,} seeds against the target's own probabilities, {result['cells']} "
        f"cells: chi-square {result['chi_square']:.2f}, p = {result['p_value']:.2f}. Of its "
        f"{result['drafted_token_samples']:,} samples that are the drafter's choice "
        f"{result['accepted_drafts']:,} were accepted drafts."
    ]


LINES: tuple[tuple[tuple[str, ...], Callable[..., list[str]]], ...] = (
    (("greedy_q8_0",), greedy_table),
    (("parts",), parts_lines),
    (("greedy_q8_0", "greedy_bf16", "greedy_q4_k_m"), types_line),
    (("greedy_q8_0",), divergence_lines),
    (("agreement",), agreement_line),
    (("sampled_q8_0",), sampled_line),
    (("distribution",), distribution_line),
)


def render(folder: Path) -> str:
    """The text between the markers; what has no file is left out."""
    lines: list[str] = []
    for names, make in LINES:
        paths = [folder / f"{name}.json" for name in names]
        if all(path.is_file() for path in paths):
            lines += make(*(json.loads(path.read_text(encoding="utf-8")) for path in paths))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    args = parser.parse_args()
    try:
        put(render(args.results), args.readme, check=args.check)
    except BenchError as error:
        sys.exit(f"{error}: python -m demo_pair.report")


if __name__ == "__main__":
    main()
