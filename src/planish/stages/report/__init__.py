"""The exit task: a page, a summary and a few scalars about a run, from the records in its root."""
