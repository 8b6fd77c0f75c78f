"""The frame of every stage: arguments, logs, lock, metrics, runs of Kubeflow."""
