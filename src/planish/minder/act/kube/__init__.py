"""The parts of Kubernetes that the monitor reads and changes."""
