"""On the path of stages that tests start: they import what they would import in their images.

Only tests need scikit-learn. transformers imports it wherever it is installed, for a way to sample
that nothing here uses: two of the seven seconds that a stage takes to load a model. They also look
for garbage as seldom as `planish.base.startup` asks for, but from the first import on.
"""

import atexit
import gc
import sys

gc.set_threshold(20_000, 20, 20)
atexit.register(gc.freeze)

# `importlib.util.find_spec` then finds no such package.
sys.modules["sklearn"] = None  # type: ignore[assignment]
