"""Work on recorded traces: files, replay, training, calibration and evaluation."""
