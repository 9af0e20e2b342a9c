"""compare, table, the page and the README's figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dspine_bench import figures, page, plots, published
from dspine_bench.cli import main
from dspine_bench.compare import Difference, compare, conditions
from dspine_bench.draft import summarize as summarize_draft
from dspine_bench.draft import summary_of
from dspine_bench.errors import BenchError
from dspine_bench.peers import FAMILIES
from dspine_bench.record import PARTS
from dspine_bench.schema import (
    DraftCase,
    DraftReport,
    DraftSample,
    Replay,
    ServerReport,
    Spread,
    load,
    save,
)
from dspine_bench.summary import summarize
from support.bench import DRAFT, PLAIN, report_of, sample

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = 360  # CSS pixels; as in the probe


@pytest.fixture
def draft(report: ServerReport) -> DraftReport:
    """A `draft` report of one shape of two layers with made-up times."""
    calls = {
        ("dflash", "graph"): 1.5, ("dflash 1 layer", "graph"): 1.0,
        ("dspine", "cut"): 1.8, ("dspine 1 layer", "cut"): 1.25,
        ("dspine", "graph"): 2.1, ("dspine", "draft"): 2.5,
        ("dflash2", "graph"): 2.5, ("dspark", "graph"): 2.4,
        ("dflash", "block"): 1.6, ("dflash", "walk"): 0.9,
        ("dspark", "block"): 2.4, ("dspark", "walk"): 0.1,
    }  # fmt: skip
    timed = [(*call, 16, ms) for call, ms in calls.items()]
    timed += [("dspine", "context", rows, 1.0) for rows in (1, 4, 16)]
    timed += [("target", "verify", rows, 1.0 + 0.1 * rows) for rows in (1, 2, 4, 8, 16)]
    samples = [
        DraftSample(case=case, call=call, rows=rows, repeat=r, ms=ms * (0.9 + 0.05 * r))
        for case, call, rows, ms in timed
        for r in range(5)
    ]
    return DraftReport(
        schema_version=1,
        provenance=report.provenance,
        hardware=report.hardware,
        workload="draft",
        config={"type": "q8_0", "repeats": 5},
        shapes={"small": {"hidden": 576, "layers": 2}},
        cases=[
            DraftCase(name=f, family=f, shape="small", type="q8_0", bytes=1, settings={})
            for f in FAMILIES
        ],
        samples=[s.model_copy(update={"case": f"{s.case}, small"}) for s in samples],
        summary=summarize_draft("small", 2, samples),
    )


def slower(report: ServerReport, factor: float) -> ServerReport:
    """The same with the draft mode's times multiplied."""
    return report_of(
        [
            s.model_copy(update={"generated_ms": s.generated_ms * factor})
            if s.mode == "draft"
            else s
            for s in report.samples
        ]
    )


def test_compare_needs_the_like(
    report: ServerReport, draft: DraftReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(report, tmp_path / "a.json")
    save(draft, tmp_path / "b.json")
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "tasks and draft cannot be compared" in capsys.readouterr().err
    bad = [s.model_copy(update={"digest": "x"}) if s.mode == "draft" else s for s in report.samples]
    save(report_of(bad), tmp_path / "c.json")
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")]) == 1
    assert "not reported" in capsys.readouterr().out


def test_table_keeps_apart(
    report: ServerReport, draft: DraftReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(report, tmp_path / "tasks.json")
    save(draft, tmp_path / "draft.json")
    paths = [str(tmp_path / "tasks.json"), str(tmp_path / "draft.json")]
    assert main(["table", *paths]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "published (not ours)" in shown and "measured here" in shown
    assert "RTX 3090" in shown and "A processor" in shown
    # no published figure gets into a result, and none is made of ours
    ours = [figure.find([report, draft]) for figure in published.FIGURES]
    assert any(ours) and any(found is None for found in ours)
    for figure, found in zip(published.FIGURES, ours, strict=True):
        assert found is None or figure.published not in found
    assert "2.00x" in str(ours[3]) and all(f.find([]) is None for f in published.FIGURES)


class _Links(HTMLParser):
    """Everything in a page that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            inside = value is None or value.startswith(("#", "data:"))
            if name in ("src", "href", "xlink:href", "srcset", "action") and not inside:
                self.found.append(f"{tag} {name}={value}")


def test_page_is_self_contained(report: ServerReport, draft: DraftReport, tmp_path: Path) -> None:
    everything = [report, report, draft]  # two of a kind: figures of the same name
    text = page.write(everything, tmp_path / "r.html").read_text()
    links = _Links()
    links.feed(text)
    assert links.found == []
    assert not re.search(r"url\((?!#|['\"]?data:)|@import|<script|<link", text)
    assert "default-src 'none'" in text and 'name="viewport"' in text
    assert text.count("<svg") == len(plots.plots(everything)) == 6
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "an id of one figure is another's too"
    for used in re.findall(r'(?:url\(#|xlink:href="#)([^")]+)', text):
        assert used in ids


def test_figures_take_the_pages_colours(report: ServerReport) -> None:
    for plot in plots.plots([report, replayed(report)]):
        assert "currentColor" in plot.svg and "#000000" not in plot.svg
        assert "fill: #ffffff" not in plot.svg
    names = [plot.name for plot in plots.plots([replayed(report)])]
    assert names == ["replay"]


def test_page_escapes(report: ServerReport) -> None:
    name = "<b>&.gguf"
    modes = [m.model_copy(update={"name": name}) if m.drafter else m for m in report.modes]
    samples = [
        s.model_copy(update={"mode": name}) if s.mode == "draft" else s for s in report.samples
    ]
    text = page.render([report_of(samples, tuple(modes))])
    assert "&lt;b&gt;&amp;.gguf" in text and "<b>&.gguf" not in text


def test_figures_are_the_same_twice(report: ServerReport, tmp_path: Path) -> None:
    first, second = (plots.plots([report]) for _ in range(2))
    assert [p.svg for p in first] == [p.svg for p in second]
    paths = plots.save_png(first, tmp_path)
    assert {p.name for p in paths} == {"speed-by-task.png", "accepted-by-position.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def _browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


PROBE = """<!doctype html><meta charset=utf-8><iframe id=f src="r.html"
style="width:360px;height:800px;border:0"></iframe><pre id=out></pre><script>
f.onload=()=>{const d=f.contentDocument,e=d.documentElement,w=e.clientWidth;
const wide=[...d.querySelectorAll('body *')].filter(x=>!x.closest('svg')&&!x.closest('.wide')
&&x.getBoundingClientRect().right>w+1).map(x=>x.tagName);
const small=[...d.querySelectorAll('figure svg')].filter(x=>x.getBoundingClientRect().width<w*0.8);
out.textContent=JSON.stringify({width:w,scroll:e.scrollWidth,wide,figures:
d.querySelectorAll('figure svg').length,small:small.length,
fetched:f.contentWindow.performance.getEntriesByType('resource').map(x=>x.name)})}</script>"""


def test_page_on_a_phone(report: ServerReport, draft: DraftReport, tmp_path: Path) -> None:
    """Nothing is wider than the screen, figures fill it, and nothing is fetched."""
    browser = _browser()
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    page.write([report, draft], tmp_path / "r.html")
    (tmp_path / "probe.html").write_text(PROBE)
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--allow-file-access-from-files", "--virtual-time-budget=10000",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            (tmp_path / "probe.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    found = re.search(r'<pre id="out">(.+?)</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    seen = json.loads(found[1])
    assert PHONE - 20 <= seen["width"] <= PHONE, seen  # a scroll bar takes some
    assert seen["scroll"] <= seen["width"], seen
    assert seen["wide"] == [] and seen["small"] == 0, seen
    assert seen["figures"] == 4 and seen["fetched"] == [], seen


def test_readme_figures(report: ServerReport, tmp_path: Path) -> None:
    """The committed results without those of the demonstration's pair, then with them."""
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    before = figures.render(tmp_path)
    save(report, tmp_path / "tasks.json")
    after = figures.render(tmp_path)
    assert (
        after != before and "| code | 2 | 2.54 | 2.00" in after and "A processor, 2 cores" in after
    )
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{figures.BEGIN}\nold\n{figures.END}\nb\n")
    figures.main(check=False, readme=readme, results=tmp_path)
    assert readme.read_text() == f"a\n{figures.BEGIN}\n{after}\n{figures.END}\nb\n"
    figures.main(check=True, readme=readme, results=tmp_path)


def replayed(report: ServerReport) -> ServerReport:
    """The same as a replay; chat-1 changes between repeats."""
    samples = [
        s.model_copy(update={"category": "replay", "first_token_ms": 9.0})
        if s.prompt != "chat-1"
        else s.model_copy(update={"category": "replay", "digest": f"{s.repeat}"})
        for s in report.samples
    ]
    replays = [
        Replay(mode=mode, repeat=r, requests=3, tokens=300, wall_ms=900.0)
        for r in range(5)
        for mode in ("plain", "draft")
    ]
    summary = summarize((PLAIN, DRAFT), samples, replays)
    return report_of(samples, workload="replay", replays=replays, summary=summary)


def typed(report: ServerReport) -> ServerReport:
    """The same with a drafter whose file is named by its type."""
    modes = (PLAIN, DRAFT.model_copy(update={"drafter": "a-b-Q4_K_M.gguf"}))
    return report_of(report.samples, modes)


def test_readme_figures_of_a_replay(report: ServerReport, tmp_path: Path) -> None:
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    save(replayed(report), tmp_path / "replay.json")
    text = " ".join(figures.render(tmp_path).split())
    said = "3 requests of up to 100 tokens, 7 drafts a round: all tokens over the wall time not"
    assert f"{said} reported" in text
    assert "time of single requests 1.98 (1.98-1.99) over 2 of 3 prompts; 2.54 tokens" in text


def test_every_part_of_record_is_committed() -> None:
    """The README leaves out what is not there."""
    results = ROOT / "bench" / "results"
    assert [p.name for p in PARTS if not (results / f"{p.name}.json").is_file()] == []


def test_readme_figures_name_another_commit(report: ServerReport, tmp_path: Path) -> None:
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    save(report, tmp_path / "tasks.json")
    save(replayed(report), tmp_path / "replay.json")
    assert "(commit" not in figures.render(tmp_path).partition("Agent conv")[2].splitlines()[0]
    other = report.provenance.model_copy(update={"commit": "b" * 40})
    save(replayed(report).model_copy(update={"provenance": other}), tmp_path / "replay.json")
    line = figures.render(tmp_path).partition("Agent conv")[2].splitlines()[0]
    assert line.endswith("(commit bbbbbbbbb)")


def test_the_golden_pairs_means_are_checked(tmp_path: Path) -> None:
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    path = tmp_path / "golden_pair.json"
    path.write_text(path.read_text().replace("5.143", "7.9"))
    with pytest.raises(BenchError, match=r"is 7\.9, its totals give 5\.143"):
        figures.render(tmp_path)


def test_readme_figures_of_two_runs(report: ServerReport, tmp_path: Path) -> None:
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    save(report, tmp_path / "tasks.json")
    save(slower(report, 1.05), tmp_path / "again" / "tasks.json")
    save(report, tmp_path / "again" / "alone.json")
    text = figures.render(tmp_path)
    assert (
        "- Measured twice (tasks): 3 ratios of times, the largest change is 4.8 %; "
        "3 of 3 mean accepted lengths are equal."
    ) in text


def test_ratios_do_not_follow_the_machine(draft: DraftReport) -> None:
    """Everything takes twice as long: the times change, the ratios do not."""
    samples = [s.model_copy(update={"ms": 2 * s.ms}) for s in draft.samples]
    busy = draft.model_copy(update={"samples": samples})
    busy = busy.model_copy(update={"summary": summary_of(busy)})
    changes = [d.change for d in compare(draft, busy)]
    assert max(abs(change) for change in changes if change is not None) == pytest.approx(1.0)
    ratios = compare(draft, busy, ratios=True)
    assert all(d.change == pytest.approx(0.0) for d in ratios)
    assert {"small, dspine / dflash, draft", "small, verify, 16 rows / 1 row"} <= {
        d.what for d in ratios
    }


@pytest.mark.parametrize(("pair", "worse"), [((1.0, None), True), ((None, 1.0), False)])
def test_what_only_one_run_reports(pair: tuple[float | None, float | None], worse: bool) -> None:
    found = Difference("a", *pair, 1)
    assert found.worse(0.1, either_way=False) is worse and found.worse(0.1, either_way=True)


def test_readme_figures_of_every_result(
    report: ServerReport, draft: DraftReport, tmp_path: Path
) -> None:
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    save(report, tmp_path / "tasks.json")
    for name in ("sweep", "types", "kv", "temperature"):
        save(typed(report), tmp_path / f"{name}.json")
    save(draft, tmp_path / "draft.json")
    text = figures.render(tmp_path)
    assert "| draft depth | 7 | 7 | 3 x 100 | 2.54 | 2.00 (1.99-2.00) |" in text
    assert "| drafter's type | Q4_K_M | 7 | 3 x 100 |" in text
    assert "| type of the caches | q8_0 | 7 |" in text and "| temperature | 0 | 7 |" in text
    assert "Above temperature 0 the texts differ" in text and "Each context" not in text
    assert "| small, the graph | 2.10 | 1.50 | 2.50 | 2.40 |" in text
    assert "| small, with the choice of tokens | 2.50 | 2.50 | - | 2.50 |" in text


def with_config(report: ServerReport, **changed: Any) -> ServerReport:
    """The same with other settings; samples of the repeats that are left."""
    config = report.config.model_copy(update=changed)
    samples = [s for s in report.samples if s.repeat < config.repeats]
    return report_of(samples, tuple(report.modes), config=config)


def test_an_edited_draft_result_is_refused(draft: DraftReport, tmp_path: Path) -> None:
    rows = [r.model_dump(mode="json") for r in draft.summary]
    rows[0]["ms"]["max"] += 1.0
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(draft.model_dump(mode="json") | {"summary": rows}))
    with pytest.raises(BenchError, match=r"draft\.json: summary\.0\.ms\.max is 2"):
        load(path)


def test_readme_figures_are_not_made_of_edited_results(
    report: ServerReport, tmp_path: Path
) -> None:
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    document = report.model_dump(mode="json")
    document["summary"][5]["tokens"] += 1
    (tmp_path / "tasks.json").write_text(json.dumps(document))
    with pytest.raises(BenchError, match=r"summary\.5\.tokens"):
        figures.render(tmp_path)


def test_the_page_says_how_it_was_measured(report: ServerReport) -> None:
    own = page.render([report])
    assert "same program, same flags" in own and "are not in the speed" in own
    assert "5 repeats; 1 warm-up request to each server dropped." in own
    assert "Fewer than 5 repeats" not in own and "--quick" not in own
    assert "bars are medians" in own
    few = page.render([with_config(report, repeats=1, warmup=0, quick=True)])
    assert "1 repeat; no warm-up; --quick" in few and "Fewer than 5 repeats" in few
    assert "ratio (min-max)" not in few and "2.00 (" not in few and "1 repeats" not in few


def test_the_page_of_servers_that_others_started(report: ServerReport) -> None:
    modes = tuple(
        m.model_copy(update={"url": f"http://{m.name}:1", "model": "m.gguf"}) for m in report.modes
    )
    text = page.render([report_of(report.samples, modes)])
    assert "same program" not in text and "Two servers that others started" in text
    assert "http://draft:1, model m.gguf" in text


def test_the_page_of_a_replay(report: ServerReport) -> None:
    replays = [
        Replay(mode=mode, repeat=r, requests=3, tokens=300, wall_ms=900.0)
        for r in range(5)
        for mode in ("plain", "draft")
    ]
    text = page.render([report_of(report.samples, workload="replay", replays=replays)])
    assert "prompts and queues included" in text and "are not in the speed" not in text


def test_the_page_of_servers_without_times(report: ServerReport) -> None:
    samples = [s.model_copy(update={"generated_ms": 0.0}) for s in report.samples]
    text = page.render([report_of(samples)])
    assert "prompt included" in text and "are not in the speed" not in text


def modes_apart(report: ServerReport) -> ServerReport:
    """Two drafting modes; the first differs in the first category, chat."""
    other = DRAFT.model_copy(update={"name": "other"})
    samples = [
        s.model_copy(update={"digest": "x"}) if (s.mode, s.category) == ("draft", "chat") else s
        for s in report.samples
    ]
    samples += [s.model_copy(update={"mode": "other"}) for s in report.samples if s.drafted]
    return report_of(samples, (PLAIN, DRAFT, other))


def test_every_mode_is_in_the_legend(report: ServerReport, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def keep(name: str, title: str, caption: str, height: float, paint: Any) -> plots.Plot:
        figure, axes = plots._pyplot().subplots(figsize=(plots.WIDTH, height), layout="constrained")
        paint(axes)
        figure.canvas.draw()
        seen.append((figure, axes))
        return plots.Plot(name, title, caption, "", b"")

    monkeypatch.setattr(plots, "_drawn", keep)
    plots.speed_by_task(modes_apart(report))
    figure, axes = seen[0]
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["draft", "other"]
    assert [t.get_text() for t in axes.texts] == ["not reported"]
    assert axes.get_xlabel() == "speed / plain decoding"
    label = axes.xaxis.label.get_window_extent()
    assert not legend.get_window_extent().overlaps(label)
    plots._pyplot().close(figure)


def test_a_png_says_what_it_is(report: ServerReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Title and caption are in the file that is passed on alone; the page has its own."""
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(plots, "_say_what_it_is", lambda _, *words: said.append(words))
    without = plots.speed_by_task(report)
    monkeypatch.undo()
    drawn = plots.speed_by_task(report)
    assert drawn is not None and without is not None
    assert said == [(drawn.title, drawn.caption)] and "5 repeats" in drawn.caption
    assert drawn.svg == without.svg
    high, higher = (int.from_bytes(plot.png[20:24], "big") for plot in (without, drawn))
    assert higher > high + 160 * plots.TITLE_HEIGHT


def test_a_sweep_has_a_curve_for_every_cache(
    report: ServerReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves: dict[str, list[int]] = {}

    def keep(_axes: Any, points: Any, _report: Any, _colour: str, label: str) -> None:
        curves[label] = [depth for depth, _ in points]

    monkeypatch.setattr(plots, "_with_ends", keep)
    monkeypatch.setattr(plots, "_legend", lambda *_: None)
    depths = {f"d n={n} {kind}": n for kind in ("q8_0", "f16") for n in (15, 3)}
    assert plots.sweep_curve(swept(report, depths)) is not None
    assert curves == {"d q8_0": [3, 15], "d f16": [3, 15]}


def test_what_noise_alone_could_give_is_no_figure(draft: DraftReport) -> None:
    """A difference of graphs that is not above zero in every repeat."""
    figure = next(f for f in published.FIGURES if f.what == "five injections")
    shown = figure.find([draft])
    assert shown and re.fullmatch(r"\[1\] 0\.\d+ \(0\.\d+-0\.\d+\) ms \(small\)", shown)
    rows = [
        r.model_copy(update={"ms": Spread(median=-0.1, min=-0.5, max=0.75)})
        if r.part == "adjacent injection"
        else r
        for r in draft.summary
    ]
    noisy = draft.model_copy(update={"summary": rows})
    assert figure.find([noisy]) == "[1] lost in noise: -0.50 to 0.75 ms (small)"
    all_found = {one.what: one for one in compare(draft, noisy)}
    found = all_found["small, dspine, adjacent injection: ms"]
    assert found.change is None and not found.worse(0.1, either_way=True)


def test_a_closed_pipe_is_quiet(report: ServerReport, tmp_path: Path) -> None:
    save(report, tmp_path / "a.json")
    code = "import sys; from dspine_bench.cli import main; sys.exit(main())"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code, "table", str(tmp_path / "a.json")],
        stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def swept(report: ServerReport, depths: dict[str, int], **changed: Any) -> ServerReport:
    """Modes of several depths, each faster than the one before."""
    modes = [
        PLAIN,
        *(DRAFT.model_copy(update={"name": n, "n_draft": d}) for n, d in depths.items()),
    ]
    modes = [m.model_copy(update=changed) for m in modes]
    samples = [s for s in report.samples if s.mode == "plain"]
    for number, name in enumerate(depths, 1):
        samples += [sample(name, s.prompt, s.repeat, 500.0 / number) for s in samples[:15]]
    return report_of(samples, tuple(modes))


def test_table_takes_the_published_depth_not_the_best(report: ServerReport) -> None:
    found = {
        figure.what: figure.find([swept(report, {"n15": 15, "n3": 3})])
        for figure in published.FIGURES
    }
    both = found["all tasks, plain and DSpine"]
    assert both is not None and "99.8 -> 200.0 tok/s, 2.00x" in both and "n15" in both
    assert "n3" not in both and "(n15)" in str(found["mean accepted length, DSpine"])
    others = published.FIGURES[0].find([swept(report, {"n3": 3, "n4": 4})])
    assert others is not None and "(n3)" in others and "(n4)" in others


def test_table_has_greedy_figures_only(report: ServerReport) -> None:
    hot = swept(report, {"n15": 15}, temperature=1.0)
    assert all(figure.find([hot]) is None for figure in published.FIGURES)
    assert "T=1; KV q8_0; 5 repeats; sampled" in published.conditions([hot])[0]


def test_table_marks_what_was_measured(
    report: ServerReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_config(report, repeats=1, quick=True)
    chat = report_of([s for s in one.samples if s.category == "chat"], config=one.config)
    save(report, tmp_path / "a.json")
    save(chat, tmp_path / "b.json")
    assert main(["table", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    shown = capsys.readouterr().out
    said = "[2] T=0; KV q8_0; 1 repeat; up to 100 tokens; --quick"
    assert said in published._heading([report, chat])
    assert "measured here" in shown and "[2] T=0;" in shown
    assert re.search(r"b\.json tasks: T=0", shown)
    assert [name for name, _ in published._others([chat])] == ["chat"]
    assert "2.00x" in str(published._others([chat])[0][1])


def test_report_on_standard_output(
    report: ServerReport,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(report, Path("one.json"))
    save(report, Path("two.json"))
    assert main(["report", "one.json", "two.json", "-o", "-"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert "<h2>tasks: one.json</h2>" in text and "<h2>Conditions: tasks: two.json</h2>" in text
    assert "by task (two.json)" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "two.json"]


def test_compare_names_rows_over_other_prompts(report: ServerReport) -> None:
    lines = conditions(report, modes_apart(report))
    assert "draft, chat: compared without chat-1" in lines
    assert conditions(report, report) == []
