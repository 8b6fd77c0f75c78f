"""transformers, opened without what nothing here uses."""

from __future__ import annotations

import sys
from typing import Any

UNUSED = ("sklearn", "scipy")


def load_transformers() -> Any:
    """Import transformers with what all its models stand on.

    Where it finds scikit-learn it loads that too, with scipy and pandas, for a way of decoding that
    no stage uses, and scipy for the loss of object detection: a quarter of the start of every
    stage. So it does not find them.
    """
    # Once loaded, transformers may have found them, and then imports them.
    is_first = "transformers" not in sys.modules
    hidden = [name for name in UNUSED if is_first and name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import transformers

        # Stages that only look at a model have no torch in their image.
        if transformers.is_torch_available():
            import transformers.generation.utils
            import transformers.modeling_layers
    finally:
        for name in hidden:
            del sys.modules[name]
    return transformers
