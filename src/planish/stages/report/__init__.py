"""The exit task: a page, a summary and a few scalars about a run, from what lies in its root."""
