"""The retention stage: an exit task that removes older checkpoints of a folder."""
