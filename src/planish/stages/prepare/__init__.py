"""First stage of a run: check everything that can be checked without a GPU, write `run.json`."""
