"""Records that cross a process boundary: numpy and pyarrow, no torch."""
