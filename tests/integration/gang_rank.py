"""A rank that trains nothing: says that it is there, and waits until a file appears.

python -m tests.integration.gang_rank FOLDER
"""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
(folder / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
while not (folder / "go").exists():
    time.sleep(0.1)
