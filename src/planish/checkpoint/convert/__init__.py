"""Rewrite, merge, comparison, import and export of checkpoints."""
