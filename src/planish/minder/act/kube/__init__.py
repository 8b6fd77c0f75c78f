"""Kubernetes, as far as the monitor reads and changes it."""
