"""Checkpoints rewritten, merged, compared, imported and exported."""
