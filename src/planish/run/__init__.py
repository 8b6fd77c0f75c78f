"""What every stage does around its own work: arguments, logs, lock, metrics, runs of Kubeflow."""
