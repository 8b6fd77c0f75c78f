"""The stage that rewrites a checkpoint for another layout, checks it and removes older ones."""
