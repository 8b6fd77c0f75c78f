"""Recorded traces: read, replayed, trained on, calibrated and evaluated with."""
