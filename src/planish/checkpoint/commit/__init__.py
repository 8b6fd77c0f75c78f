"""When a checkpoint exists: its commit, the journal of each attempt, the list of all."""
