"""A headless browser for the tests that look at pages."""

import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip

NEEDS_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install -y chromium"),
]
"""Marks of a module that opens pages."""


def chromium(page, *flags):
    """Open a local page; its profile lies beside it."""
    profile = f"--user-data-dir={page.parent}/profile"
    command = [CHROMIUM, *FLAGS, profile, *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120, check=True)
