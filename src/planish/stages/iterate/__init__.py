"""Several iterations as one task, whose ranks keep trainer and engine in memory."""
