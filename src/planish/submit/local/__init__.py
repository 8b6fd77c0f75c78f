"""Runs on this machine: one run, a list of runs, a run from Python."""
