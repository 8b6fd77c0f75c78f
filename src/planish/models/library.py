"""transformers, opened without what nothing here uses."""

from __future__ import annotations

import sys
from typing import Any


def load_transformers() -> Any:
    """Import transformers with what all its models stand on.

    Where it finds scikit-learn it loads that too, with scipy and pandas, for a way of decoding that
    no stage uses: a sixth of the start of every stage. So it does not find it.
    """
    hides = "sklearn" not in sys.modules and "transformers.generation.utils" not in sys.modules
    if hides:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        import transformers

        # Stages that only look at a model have no torch in their image.
        if transformers.is_torch_available():
            import transformers.generation.utils
    finally:
        if hides:
            del sys.modules["sklearn"]
    return transformers
