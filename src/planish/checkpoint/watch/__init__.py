"""Cost of saves and loads: metrics and timing records."""
