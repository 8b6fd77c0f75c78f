"""The runs of a Kubeflow installation: how one was started, and starting one like it."""
