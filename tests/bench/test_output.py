"""compare, table, the page and the README's figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from dspine_bench import figures, page, plots, published
from dspine_bench.cli import main
from dspine_bench.schema import (
    DraftCase,
    DraftReport,
    DraftRow,
    DraftSample,
    ServerReport,
    Spread,
    save,
)
from support.bench import report_of

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = 360  # CSS pixels; as in the probe


@pytest.fixture
def draft(report: ServerReport) -> DraftReport:
    """A `draft` report of one shape with made-up times."""
    families = ("dspine", "dflash", "dflash2", "dspark")
    rows = [
        ("layers", families, 1.0), ("head", families, 0.5), ("draft", families, 2.5),
        ("adjacent injection", ("dspine",), 0.1),
        ("candidates", ("dspine",), 0.2), ("transition cache", ("dspine",), 0.3),
        ("Markov head", ("dspark",), 0.9),
    ]  # fmt: skip

    def part(family: str, name: str, ms: float, width: int = 16) -> DraftRow:
        spread = Spread(median=ms, min=ms * 0.9, max=ms * 1.1)
        return DraftRow(
            shape="small", family=family, part=name, rows=width, ms=spread, how="made up"
        )

    summary = [part(f, name, ms) for name, those, ms in rows for f in those]
    summary += [part("target", "verify", 1.0 + 0.1 * w, w) for w in (1, 2, 4, 8, 16)]
    return DraftReport(
        schema_version=1,
        provenance=report.provenance,
        hardware=report.hardware,
        workload="draft",
        config={"type": "q8_0", "repeats": 5},
        shapes={"small": {"hidden": 576}},
        cases=[
            DraftCase(name=f, family=f, shape="small", type="q8_0", bytes=1, settings={})
            for f in families
        ],
        samples=[DraftSample(case="dspine", call="graph", rows=16, repeat=0, ms=1.0)],
        summary=summary,
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


@pytest.mark.parametrize(
    ("factor", "words", "code"),
    [
        (1.0, [], 0),
        (1.05, [], 0),
        (1.2, [], 1),
        (1.2, ["--threshold", "0.3"], 0),
        (0.8, [], 0),
        (0.8, ["--either-way"], 1),
    ],
)
def test_compare(
    factor: float,
    words: list[str],
    code: int,
    report: ServerReport,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    save(report, paths[0])
    save(slower(report, factor), paths[1])
    assert main(["compare", *map(str, paths), *words]) == code
    shown = capsys.readouterr().out
    assert "draft, all: ratio" in shown
    assert ("past the threshold" in shown) == bool(code)


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
    assert after != before and "| code | 2.54 | 2.00" in after and "A processor, 2 cores" in after
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{figures.BEGIN}\nold\n{figures.END}\nb\n")
    figures.main(check=False, readme=readme, results=tmp_path)
    assert readme.read_text() == f"a\n{figures.BEGIN}\n{after}\n{figures.END}\nb\n"
    figures.main(check=True, readme=readme, results=tmp_path)


def test_readme_figures_of_every_result(
    report: ServerReport, draft: DraftReport, tmp_path: Path
) -> None:
    for name in ("golden_pair.json", "convert.json"):
        shutil.copy(ROOT / "bench" / "results" / name, tmp_path / name)
    save(report, tmp_path / "tasks.json")
    save(report, tmp_path / "sweep.json")
    save(draft, tmp_path / "draft.json")
    text = figures.render(tmp_path)
    assert "- By draft depth" in text and "7: 2.00" in text
    assert "shape small: DSpine 2.50, DFlash 2.50" in text
