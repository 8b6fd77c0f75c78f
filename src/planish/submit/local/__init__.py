"""Runs on this machine: a single run, a list of runs, a run from Python."""
