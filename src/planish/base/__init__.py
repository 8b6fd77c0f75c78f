"""Errors, configuration, log lines, metrics and process groups, which every other package uses."""
