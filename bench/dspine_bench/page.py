"""`report.html`: one file with everything in it, for a phone as for a desk.

Nothing is fetched: styles are in the page, figures are inline SVG without fonts, and the content
security policy forbids the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from dspine_bench.plots import Plot, caption, headings, plots
from dspine_bench.schema import (
    MIN_REPEATS,
    ConvertReport,
    DraftReport,
    EngineReport,
    Report,
    Row,
    ServerReport,
)
from dspine_bench.summary import uses_server_clock
from dspine_bench.terminal import (
    by_category,
    counted,
    draft_parts,
    equal_text,
    facts,
    is_quick,
    length_text,
    ratio_head,
    ratio_text,
    repeats_of,
    request_text,
    spread_text,
)
from dspine_bench.urls import from_urls, unlike

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root{color-scheme:light dark;--line:#8884;--quiet:#666;--paper:#fff;--ink:#1b1b1b;--bad:#b3261e}
@media(prefers-color-scheme:dark){
:root{--paper:#14171a;--ink:#e6e6e6;--quiet:#9aa;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:46rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .5rem}
figure{margin:1.5rem 0;padding:.5rem;border:1px solid var(--line);border-radius:.5rem}
figure svg{display:block;width:100%;max-width:34rem;height:auto;margin:0 auto;fill:currentColor}
figcaption{font-size:.8rem;color:var(--quiet);margin-top:.25rem}figcaption b{color:var(--ink)}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:.5rem}
table{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .5rem;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--quiet);font-weight:600}
th:first-child,td:first-child,.modes :is(th,td):nth-child(2){text-align:left}
@media(max-width:40rem){.modes td:nth-child(2){white-space:normal;min-width:7rem}}
.modes tr.first td{border-top:2px solid var(--line)}
p,li{margin:.4rem 0}.quiet{color:var(--quiet);font-size:.85rem}
.bad{color:var(--bad);font-weight:600}
dl{display:grid;grid-template-columns:auto minmax(0,1fr);gap:.2rem .8rem;font-size:.85rem}
dt{color:var(--quiet)}dd{margin:0}
"""


METHODS = {
    "convert": "A random checkpoint of the 27B drafter's shape to BF16, Q8_0 and Q4_K_M: ours in "
    "one pass, against a plain gguf-py script for BF16 and llama-quantize twice; in turn.",
    "engine": "The same prompts by the library in one process and by llama-server, in turn: "
    "milliseconds of a round, from the end of the prompt.",
}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself; rows of one first cell are a group, which is named once."""
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body, last = "", ""
    for name, *rest in rows:
        first = ' class="first"' if last and name != last else ""
        cells = ["" if name == last else name, *rest]
        body += f"<tr{first}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        last = name
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    modes = " modes" if "mode" in heads[1:2] else ""
    return f'<div class="wide{modes}">{table}</div>'


def _server_row(row: Row, report: ServerReport) -> list[str]:
    """What matters most comes first: a phone shows the first columns."""
    same, repeats = escape(equal_text(row)), report.config.repeats
    texts = [ratio_text(row, repeats)]
    texts += [request_text(row, repeats)] if report.workload == "replay" else []
    if any(row.mode == mode.baseline for mode in report.modes):
        texts = ["1"] * len(texts)
    return [
        escape(row.category),
        escape(row.mode),
        *(escape(text).replace(" over ", "<br>over ").removesuffix(" prompts") for text in texts),
        length_text(row),
        f'<span class="bad">{same}</span>' if row.differing else same,
        f"{row.speed.median:.1f}" if row.speed else "not reported",
        f"{100 * row.acceptance_rate:.1f} %" if row.drafted else "",
    ]


def _place(report: ServerReport) -> str:
    """Where the modes ran."""
    if from_urls(report):
        return (
            "Two servers that others started, asked in turn; their flags and machines are not "
            "known here. Ratios are against the second, which drafted nothing."
        )
    turns = (
        "The servers ran side by side, anew in every repeat, every request went to each in turn"
        if report.config.interleave == "request"
        else "The servers ran one at a time, all of them in every repeat"
    )
    return (
        f"{turns}: same program, same flags. Ratios are against the same server without a drafter."
    )


def _clock(report: ServerReport) -> str:
    """What the speed is of."""
    if report.workload == "replay":
        return (
            "The speed is all output tokens over the wall time, prompts and queues included; it is "
            "reported where every text is that of plain decoding. The requests' ratio is plain "
            "decoding's time over the mode's, from sending to the last token, of the requests "
            "whose text is the same in all repeats of both."
        )
    added = "Tokens and times are added, then divided."
    if uses_server_clock(report.samples):
        return f"{added} Load, tokenizing and the prompt's time are not in the speed."
    return f"{added} A server gave no times: speeds there are of whole requests, prompt included."


def _amount(report: Report) -> str:
    """How often, and whether that is enough."""
    repeats = repeats_of(report)
    parts = [counted(repeats, "repeat")]
    if isinstance(report, ServerReport):
        warmup = report.config.warmup
        asked = f"{counted(warmup, 'warm-up request')} to each server dropped"
        parts.append(asked if warmup else "no warm-up")
    elif not isinstance(report, ConvertReport):
        parts.append("the first turn dropped")
    if is_quick(report):
        parts.append("--quick: fewer and shorter requests")
    text = f"<p>{escape('; '.join(parts))}.</p>"
    if repeats < MIN_REPEATS:
        few = f"Fewer than {MIN_REPEATS} repeats: too few to publish."
        text += f'<p class="bad">{few}</p>'
    return text


def _method(report: Report) -> str:
    if isinstance(report, ServerReport):
        said = f"{_place(report)} 1.0 is plain decoding. {_clock(report)}"
    elif isinstance(report, DraftReport):
        said = "Random weights: times alone mean something."
    else:
        said = METHODS[report.workload]
    return f'<p class="quiet">{escape(said)}</p>{_amount(report)}'


def _server_section(report: ServerReport, heading: str) -> str:
    ratio = ratio_head(report.config.repeats)
    requests = ["requests' ratio"] if report.workload == "replay" else []
    heads = ["", "mode", ratio, *requests, "mean length", "same text", "tok/s", "accepted"]
    table = _table(heads, [_server_row(row, report) for row in by_category(report)])
    differing = [row for row in report.summary if row.differing]
    note = ""
    if differing:
        names = sorted({name for row in differing for name in row.differing})
        note = f'<p class="bad">Other text than plain decoding: {escape(", ".join(names))}</p>'
    note += "".join(f'<p class="bad">{escape(line)}</p>' for line in unlike(report.modes))
    extra = _latencies(report) if report.workload == "replay" else ""
    return f"<h2>{escape(heading)}</h2>{_method(report)}{note}{table}{extra}"


def _latencies(report: ServerReport) -> str:
    rows = []
    for row in report.summary:
        for name, spread in (("request", row.latency_ms), ("first token", row.first_token_ms)):
            if spread:
                ms = (spread.median, spread.min, spread.max)
                rows.append([name, escape(row.mode), *(f"{value:.0f}" for value in ms)])
    rows.sort(key=lambda cells: cells[0], reverse=True)  # requests, then first tokens
    text = "Milliseconds of single requests."
    table = _table(["", "mode", "median", "min", "max"], rows)
    return f'<p class="quiet">{text}</p>{table}'


def _draft_section(report: DraftReport, heading: str) -> str:
    made = [f"<h2>{escape(heading)}</h2>{_method(report)}"]
    repeats = repeats_of(report)
    for shape in report.shapes:
        families = list(dict.fromkeys(c.family for c in report.cases if c.shape == shape))
        rows = []
        for part, by_family in draft_parts(report.summary, shape).items():
            cells = [by_family.get(family) for family in families]
            rows.append(
                [escape(part), *(spread_text(c.ms, repeats, 3) if c else "" for c in cells)]
            )
        made.append(f"<p>Shape {escape(shape)}, milliseconds</p>{_table(['', *families], rows)}")
    return "".join(made)


def _facts_section(report: ConvertReport | EngineReport, heading: str) -> str:
    rows = [[escape(name), escape(value)] for name, value in facts(report).items()]
    return f"<h2>{escape(heading)}</h2>{_method(report)}{_table(['', ''], rows)}"


def _section(report: Report, heading: str) -> str:
    if isinstance(report, ServerReport):
        return _server_section(report, heading)
    if isinstance(report, DraftReport):
        return _draft_section(report, heading)
    return _facts_section(report, heading)


def _conditions(report: Report, heading: str) -> str:
    p, h = report.provenance, report.hardware
    devices = "; ".join(f"{d.description} ({d.backend})" for d in h.devices)
    lines = {
        "made": f"{p.time} by dspine {p.version}, commit {p.commit or 'unknown'}"
        + (" with changes" if p.dirty else ""),
        "llama.cpp": f"{p.pin} ({p.build})",
        "machine": f"{h.cpu}, {h.cores} cores, {h.memory_bytes / 2**30:.0f} GiB; {h.system}"
        + (" (of the client)" if from_urls(report) else ""),
        "devices": devices or "none",
        "driver": f"{h.driver or 'none'} {h.limits or ''}",
        "command": " ".join(p.command),
    }
    if p.environment:
        lines["environment"] = " ".join(f"{k}={v}" for k, v in p.environment.items())
    if isinstance(report, ServerReport | EngineReport):
        for model in report.models:
            size = f"{model.bytes / 1e9:.2f} GB"
            lines[model.role + " " + model.name] = f"{model.type}, {size}, sha256 {model.sha256}"
    if isinstance(report, ServerReport):
        for mode in report.modes:
            if mode.url:
                lines[mode.name] = f"{mode.url}, model {mode.model or 'not known'}"
                lines[mode.name] += f", build {mode.build or 'not known'}"
    shown = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in lines.items())
    return f"<h2>Conditions: {escape(heading)}</h2><dl>{shown}</dl>"


def _figure(plot: Plot) -> str:
    text = f"<b>{escape(plot.title)}.</b> {escape(plot.caption)}"
    return (
        f'<figure role="img" aria-label="{escape(plot.title)}">{plot.svg}'
        f"<figcaption>{text}</figcaption></figure>"
    )


def render(reports: Sequence[Report], names: Sequence[str] = ()) -> str:
    """The page; `names` are those of the results' files."""
    titles = headings(reports, names)
    titled = list(zip(reports, titles, strict=True))
    sections = [_section(report, title) for report, title in titled]
    head = escape(caption(reports[0])) if reports else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>dspine benchmark</title><style>{STYLE}</style></head><body>"
        f'<h1>dspine benchmark</h1><p class="quiet">{head}</p>'
        + "".join(_figure(plot) for plot in plots(reports, names))
        + "".join(sections)
        + "".join(_conditions(r, t) for r, t in titled)
        + "</body></html>\n"
    )


def write(reports: Sequence[Report], path: Path, names: Sequence[str] = ()) -> Path:
    """Write the page."""
    text = render(reports, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
