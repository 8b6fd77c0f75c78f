import shutil
import subprocess

import numpy as np
import pytest

from planish.run.stage import PathArtifact
from planish.stages.report.stage import run
from tests.unit.stages.report.synthetic_run import build_run, disturb

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install -y chromium"),
]


def chromium(page, *flags):
    """Open a local page; its profile lies beside it."""
    profile = f"--user-data-dir={page.parent}/profile"
    command = [CHROMIUM, *FLAGS, profile, *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    root = f"file://{folder}/arithmetic"
    build_run(root)
    disturb(root)
    summary, target = (PathArtifact(str(folder / name)) for name in ("summary", "report.html"))
    run(
        root=root, state="SUCCEEDED", failed_task="", error_message="",
        max_restarts=0, report=target, summary=summary,
    )  # fmt: skip
    return folder / "report.html"


def screenshot(page, width, height, *flags):
    import matplotlib.image

    target = page.parent / f"{width}{''.join(flags)[-8:]}.png"
    chromium(page, f"--window-size={width},{height}", f"--screenshot={target}", *flags)
    return matplotlib.image.imread(target)[:, :, :3], target


MEASURE = """
<script>
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  const texts = [...document.querySelectorAll("svg text")].filter(t => t.getClientRects().length);
  const small = texts.filter(t => t.textContent.trim()
    && parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getScreenCTM().a < 11.5);
  const visible = [...document.querySelectorAll("main *")].filter(e => e.getClientRects().length);
  const size = e => parseFloat(getComputedStyle(e).fontSize);
  const tiny = visible.filter(e => !e.ownerSVGElement && size(e) < 12);
  let overlaps = 0;
  for (const svg of document.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].map(t => t.getBoundingClientRect());
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
      if (a.left < b.right - 1 && b.left < a.right - 1
          && a.top < b.bottom - 3 && b.top < a.bottom - 3) overlaps += 1;
    }));
  }
  const wide = document.documentElement.scrollWidth;
  const outside = visible.filter(e => !e.ownerSVGElement && (e.scrollWidth > e.clientWidth + 1
    && getComputedStyle(e).display != "inline" || e.getBoundingClientRect().right > innerWidth));
  const cut = texts.filter(t => t.getBoundingClientRect().right > innerWidth
    || t.getBoundingClientRect().left < 0);
  const panels = [...document.querySelectorAll(".panel")].filter(p => p.querySelector("svg"));
  const columns = new Set(panels.map(p => Math.round(p.getBoundingClientRect().left))).size;
  top.document.title = JSON.stringify({texts: texts.length, small: small.length, tiny: tiny.length,
    overlaps, wide, columns, cut: cut.length,
    outside: outside.map(e => e.outerHTML.slice(0, 60))});
});
</script>
"""


def measure(page, width):
    """Let the page measure itself; the script is added here, the report has none."""
    import html
    import json
    import re

    text = page.read_text().replace("default-src 'none'; style-src 'unsafe-inline'", "", 1)
    copy = page.parent / f"measured-{width}.html"
    text = text.replace("</body>", f"{MEASURE}</body>")
    # No window is narrower than 500 pixels; a frame may be.
    frame = f"<title></title><body style='margin: 0'><iframe srcdoc='{html.escape(text)}' "
    copy.write_text(f"{frame} style='width: {width}px; height: 9000px; border: 0'></iframe>")
    dumped = chromium(copy, "--window-size=1400,9000", "--dump-dom").stdout.decode()
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dumped)[1]))


def test_text_is_readable_and_does_not_overlap_at_1280_pixels(page):
    found = measure(page, 1280)
    assert found["texts"] > 100
    assert (found["small"], found["tiny"], found["overlaps"]) == (0, 0, 0)
    assert found["wide"] <= 1280
    assert found["columns"] == 2


def test_a_narrow_window_has_one_column_and_no_sideways_scrolling(page):
    found = measure(page, 700)
    assert found["columns"] == 1
    assert found["wide"] <= 700


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED"])
def test_half_a_window_shows_all_of_it_in_readable_size(state, page, tmp_path):
    """The panel of Kubeflow beside the graph is about 480 pixels wide, a telephone 400."""
    target = PathArtifact(str(tmp_path / "report.html"))
    run(
        root=f"file://{page.parent}/arithmetic", state=state, failed_task="post-train",
        error_message="x" * 300, max_restarts=0, report=target,
        summary=PathArtifact(str(tmp_path / "summary")),
    )  # fmt: skip
    for width in (480, 400):
        found = measure(tmp_path / "report.html", width)
        assert found["texts"] > 100
        assert found["outside"] == []
        assert found["wide"] <= width
        assert (found["small"], found["tiny"], found["overlaps"], found["cut"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("width", [300, 220])
def test_the_narrowest_panel_of_kubeflow_cuts_no_number_of_a_card(width, page):
    outside = measure(page, width)["outside"]
    assert not [text for text in outside if 'class="card' in text or 'class="value"' in text]


def test_a_screenshot_shows_every_colour_of_the_charts(page):
    pixels, target = screenshot(page, 1280, 3200)
    assert pixels.shape == (3200, 1280, 3)
    assert target.stat().st_size < 500_000
    for red, green, blue in ((47, 102, 224), (217, 115, 13), (12, 154, 131), (122, 84, 207)):
        near = np.abs(pixels * 255 - np.array([red, green, blue])).max(axis=2) < 3
        assert near.sum() > 200, (red, green, blue)
    assert pixels[5, 5].min() > 0.95, "the page is light by default"


def test_a_dark_browser_gets_a_dark_page(page):
    pixels, _ = screenshot(page, 1280, 1200, "--blink-settings=preferredColorScheme=0")
    assert pixels[1190, 5].max() < 0.15
