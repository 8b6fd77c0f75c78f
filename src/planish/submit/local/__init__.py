"""Runs on this machine: one, a list of them, and one from Python."""
