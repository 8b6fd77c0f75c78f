"""The commands of `planish minder`, and their exit codes."""

CLEAN = 0
FAULT_FOUND = 2
BAD_INPUT = 3
BACKEND_UNAVAILABLE = 4
