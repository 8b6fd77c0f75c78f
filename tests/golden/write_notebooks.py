"""Writes the notebooks of `examples/notebooks` from the pages whose code tests run.

python -m tests.golden.write_notebooks
"""

import json
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = {
    "python.ipynb": "docs/python.md",
    "kfp.ipynb": "docs/kfp.md",
}
"""Name -> the page that it is."""


def notebook(page: str) -> str:
    """Return a page as a notebook: its Python blocks are cells of code, the rest is text."""
    text = (REPOSITORY / page).read_text("utf-8")
    cells = []
    for place, part in enumerate(re.split(r"^```python\n(.*?)^```\n", text, flags=re.M | re.S)):
        cell = {"id": f"cell-{place}", "metadata": {}, "source": part.strip().splitlines(True)}
        if place % 2:
            cells.append({**cell, "cell_type": "code", "execution_count": None, "outputs": []})
        elif part.strip():
            # Links of the page lead from its own folder.
            linked = re.sub(r"\]\((?!https?:|#)", "](../../docs/", part.strip())
            source = linked.splitlines(True)
            cells.append({**cell, "cell_type": "markdown", "source": source})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, page in NOTEBOOKS.items():
        path = REPOSITORY / "examples/notebooks" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(notebook(page), "utf-8")
