"""A rank of training whose layers take twice as long, once a file is there.

python -m tests.integration.slowed_rank PIN, with SLOW_RANK and SLOW_FILE in the environment. It
sleeps as long as it has just computed: on a busy machine, which stops any process half of the time
anyhow, being stopped for another half would change little.
"""

import functools
import os
import sys
import time
from pathlib import Path

from planish.run import layer_clock
from planish.stages.train import sharded_model
from planish.stages.train.ranks import worker

FILE = Path(os.environ["SLOW_FILE"])


def slowed(forward):
    """Return a forward pass that takes twice as long while the file is there."""

    @functools.wraps(forward)
    def twice(*args, **options):
        began = time.perf_counter()
        result = forward(*args, **options)
        if FILE.exists():
            time.sleep(time.perf_counter() - began)
        return result

    return twice


def time_slowed_layers(scorer):
    """Time the layers as always, and slow them."""
    layer_clock.time_layers(scorer)
    for name, module in scorer.named_modules():
        if layer_clock._LAYER.search(name):
            module.forward = slowed(module.forward)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["SLOW_RANK"]:
        sharded_model.time_layers = time_slowed_layers
    raise SystemExit(worker.main(sys.argv[1:]))
