"""A rank that trains, and that is killed a while after it has begun, or left out, a commit.

python -m torch.distributed.run ... -m tests.integration.killed_rank PIN RANK STEP SECONDS
"""

import logging
import os
import signal
import sys
import threading

from planish.stages.train.ranks.worker import main


class Killer(logging.Handler):
    """Ends this process without a word once it has logged what becomes of the commit of a step."""

    def __init__(self, step: int, seconds: float) -> None:
        super().__init__()
        self.words, self.seconds = (f" step={step} ", f"/step-{step:08d} "), seconds

    def emit(self, record: logging.LogRecord) -> None:
        if any(words in record.getMessage() for words in self.words):
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    pin, rank, step, seconds = sys.argv[1:]
    if os.environ["RANK"] == rank:
        logging.getLogger("planish").addHandler(Killer(int(step), float(seconds)))
    raise SystemExit(main([pin]))
