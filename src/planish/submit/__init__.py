"""Runs from an installed package: start, schedule, watch, stop and clean them up on a cluster.

Those on this machine are in `local/`.

Pipelines are compiled before the package is built (`python -m pipelines.compile`); nothing here
needs the SDK of Kubeflow, only the generated client of its API.
"""
