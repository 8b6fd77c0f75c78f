"""The page of a save in a real browser: nothing overlaps, nothing is cut, light and dark."""

from __future__ import annotations

import json
import re

import matplotlib.image
import numpy as np
import pytest

from planish.checkpoint.watch.report_page import html_report
from planish.checkpoint.watch.timings import Timeline, Timing
from tests.integration.browser import NEEDS_BROWSER, chromium

pytestmark = NEEDS_BROWSER

MEASURE = """
<script>
window.addEventListener("load", () => {
  let overlaps = 0;
  const boxes = [...document.querySelectorAll("svg")].map(
    svg => [...svg.querySelectorAll("text")].map(t => t.getBoundingClientRect()));
  boxes.forEach(texts => texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
    if (a.left < b.right - 1 && b.left < a.right - 1
        && a.top < b.bottom - 3 && b.top < a.bottom - 3) overlaps += 1;
  })));
  const outside = [...document.querySelectorAll("svg")].flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text, rect")].map(e => e.getBoundingClientRect())
      .filter(b => b.left < frame.left - 1 || b.right > frame.right + 1);
  }).length;
  const cut = [...document.querySelectorAll(".cells i")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).length;
  const small = [...document.querySelectorAll("main *")].filter(e => e.getClientRects().length
    && !e.ownerSVGElement && parseFloat(getComputedStyle(e).fontSize) < 12).length;
  document.title = JSON.stringify({overlaps, outside, cut, small,
    wide: document.documentElement.scrollWidth});
});
</script>
"""


def save_of(num_ranks):
    """Records of a save by many ranks, of which one is far slower than the others."""
    rng = np.random.default_rng(0)
    records = []
    for rank in range(num_ranks):
        host, slow = f"node-{rank // 8:03d}.cluster", 4.0 if rank == 13 else 1.0
        end = 100.05
        records.append(Timing(rank, "save", "", "plan", 100.0, end, host=host))
        for state, size in (("policy.model", 512 << 20), ("policy.optim", 1 << 30)):
            copied = end + size / 9e9
            records.append(Timing(rank, "save", state, "stage", end, copied, size, host=host))
            for part in range(2):
                seconds = slow * size / 6e8 * (1 + 0.1 * rng.random())
                start, end = (copied if part == 0 else end), copied + (part + 1) * seconds
                key = f"data/{state}/{rank:05d}-{part}.safetensors"
                records.append(
                    Timing(rank, "save", state, "upload", start, end, size // 2, key, part, host)
                )
            end = copied
    return Timeline(records)


@pytest.fixture(params=[1, 32, 512, 9000])
def page(request, tmp_path):
    html = html_report(save_of(request.param), title="s3://runs/math-7b/states/step-00000100")
    path = tmp_path / "page.html"
    path.write_text(html)
    return path


def screenshot(page, *flags):
    target = page.parent / f"{len(flags)}.png"
    chromium(page, "--window-size=1280,1400", f"--screenshot={target}", *flags)
    return matplotlib.image.imread(target)[:, :, :3]


@pytest.mark.parametrize("width", [1280, 1000])
def test_nothing_overlaps_or_leaves_its_frame(page, width):
    measured = page.with_name("measured.html")
    text = page.read_text().replace("default-src 'none'", "script-src 'unsafe-inline'")
    measured.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    dom = chromium(measured, f"--window-size={width},900", "--dump-dom").stdout.decode()
    found = json.loads(re.search(r"<title>(\{.*?\})</title>", dom)[1].replace("&quot;", '"'))
    assert found["wide"] <= width
    assert found == {**found, "overlaps": 0, "outside": 0, "cut": 0, "small": 0}


def test_the_page_is_light_or_dark_as_the_browser_wants_it(page):
    light = screenshot(page)
    assert light[1390, 5].min() > 0.9
    dark = screenshot(page, "--blink-settings=preferredColorScheme=0")
    assert dark[1390, 5].max() < 0.15
    for pixels in (light, dark):
        red = (pixels[:, :, 0] > 0.8) & (pixels[:, :, 1] < 0.4) & (pixels[:, :, 2] < 0.5)
        has_straggler = "straggler, beyond" in page.read_text()
        assert (red[300:].sum() > 80) == has_straggler
