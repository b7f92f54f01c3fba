"""Shows reports in Chromium, on a desktop and on a phone."""

import html
import json
import re
from pathlib import Path

import pytest
from reported import ENVIRONMENT, make_run

from rankzero.show.report.page import REPORT, write_report
from running import require
from system.browser import chromium

MEASURE = """<script>
const describe = element => `${element.tagName}.${element.getAttribute("class")} ${element.textContent.slice(0, 40)}`;
const box = element => element.getBoundingClientRect();
const outside = [...document.querySelectorAll("body *")]
  .filter(element => box(element).width && (box(element).right > innerWidth + 1 || box(element).left < -1));
const overlapping = [];
for (const axis of document.querySelectorAll(".x-axis, .y-axis, .canvas")) {
  const boxes = [...axis.querySelectorAll("span")].map(box).filter(one => one.width);
  boxes.forEach((one, index) => boxes.slice(0, index).forEach(other => {
    if (one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)
      overlapping.push(describe(axis));
  }));
}
const clipped = [...document.querySelectorAll(".card, .facts div, td, figcaption")]
  .filter(element => element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display != "inline");
const axes = [...document.querySelectorAll(".x-axis em")].filter(x => box(x).height).map(x => x.textContent);
const lines = [...document.querySelectorAll(".line")].filter(line => box(line).width < 1 && box(line).height < 1);
parent.postMessage({
  width: document.documentElement.scrollWidth, title: document.title, charts: document.querySelectorAll("svg").length,
  outside: outside.map(describe), overlapping, clipped: clipped.map(describe), axes: [...new Set(axes)],
  invisible: lines.length,
}, "*");
</script>"""

FRAME = """<body style="margin: 0"><iframe src="{page}" style="border: 0; width: {width}px; height: 3000px"></iframe>
<script>addEventListener("message", message => document.body.textContent = JSON.stringify(message.data))</script>"""
"""Chromium's own window is at least 500 pixels wide, so that a frame stands for the screen."""


def measured(folder: Path, report: Path, width: int, select: str = "") -> dict:
    """Returns the measured layout of a report on a screen of this width."""
    text = report.read_text()
    without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert without_policy != text
    page, frame = folder / "measured.html", folder / "frame.html"
    page.write_text(
        without_policy.replace(f'id="{select}"', f'id="{select}" checked').replace("</body>", f"{MEASURE}</body>")
    )
    frame.write_text(FRAME.format(page=page.as_uri(), width=width))
    out = chromium(folder, frame.as_uri(), "--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom")
    return json.loads(html.unescape(re.search(r"<body[^>]*>(.*)</body>", out, re.DOTALL)[1]))


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """Returns reports of a run with three attempts, and of one with long names."""
    require("chromium")
    monkeypatch.chdir(tmp_path)
    word, text = "a_long_name_" * 12, "some long words " * 40
    stopped = {"status": "stopped", "reason": "the time limit", "slow_ranks": ["rank 1 is slow"]}
    environment = {"device": text, "hosts": {word: 8}, "command": ["python", word, text], "folder": f"/{word}"}
    failed = {"status": "failed", "reason": word, "slow_ranks": [text], "samples": 10**13, "ledger": [word]}
    failed["metrics"] = {word: 1.0, "loss": 1e-12}
    runs = [
        make_run(Path("runs/three"), (0, 120, 210), **stopped),
        make_run(Path("runs") / word[:80], (0,), {**ENVIRONMENT, **environment}, **failed),
    ]
    (runs[1][0].path / "config.yaml").write_text(f"{word}: {word}\n")
    return [write_report(run, summary).absolute() for run, summary in runs]


@pytest.mark.parametrize("width", [1280, 320])
def test_nothing_is_wider_than_the_screen_and_no_labels_overlap(reports, tmp_path, width):
    for report in reports:
        layout = measured(tmp_path, report, width)
        assert layout.pop("width") <= width and layout.pop("title") and layout.pop("charts") == 8
        assert layout == {"outside": [], "overlapping": [], "clipped": [], "axes": ["steps"], "invisible": 0}


def test_a_report_is_shown_as_written_and_a_reader_can_choose_the_axis_without_scripts(reports, tmp_path):
    layout = measured(tmp_path, reports[0], 360, "axis-3")
    assert layout["axes"] == ["epochs"] and layout["overlapping"] == []
    screenshot = tmp_path / "report.png"
    chromium(tmp_path, reports[0].as_uri(), "--window-size=1280,1000", f"--screenshot={screenshot}")
    assert screenshot.stat().st_size > 50_000
    assert reports[0].name == REPORT
