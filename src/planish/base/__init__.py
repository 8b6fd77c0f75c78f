"""What every part of the program stands on: errors, configuration, log lines and metrics, ranks."""
