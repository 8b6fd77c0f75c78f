"""Last stage of a run: submit the following run of a chain."""
