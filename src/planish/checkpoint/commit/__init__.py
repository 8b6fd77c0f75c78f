"""Existence of checkpoints: the commit, the journal of each attempt, the catalog of all."""
