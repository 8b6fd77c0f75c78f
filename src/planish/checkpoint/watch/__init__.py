"""What saves and loads cost: metrics, timing records and their page."""
