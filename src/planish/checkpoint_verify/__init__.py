"""The verify stage: reads a checkpoint or policy back and compares it with its source."""
