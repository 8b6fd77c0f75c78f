"""SmolLM2-135M-Instruct for tests, in `.cache`; `python -m tests.real_model` fetches it."""

import sys
from pathlib import Path

import pytest

from planish.base.errors import ConfigError
from planish.submit.local.small_model import make_folder

FOLDER = Path(__file__).resolve().parents[1] / ".cache/smollm2"


def require_model() -> Path:
    """Return the folder of the model; a test that cannot have it is skipped."""
    try:
        return make_folder(FOLDER)
    except ConfigError as error:
        pytest.skip(f"no trained model; get it by `python -m tests.real_model` ({error})")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{make_folder(FOLDER)}\n")
    except ConfigError as error:
        raise SystemExit(str(error)) from None
