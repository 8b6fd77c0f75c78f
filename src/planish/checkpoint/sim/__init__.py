"""Planning at any scale in one process: real coordinator code over made-up layouts; no torch."""
