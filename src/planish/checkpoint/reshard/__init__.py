"""Rewrite a checkpoint for another layout, check the result, and keep the newest of a folder."""
