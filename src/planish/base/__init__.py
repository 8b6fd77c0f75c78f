"""The base of every part of the program: errors, configuration, log lines and metrics, ranks."""
