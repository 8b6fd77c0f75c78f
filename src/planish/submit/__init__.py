"""Runs on a cluster from an installed package: start, schedule, watch, stop and clean them up.

Pipelines are compiled before the package is built (`python -m pipelines.compile`); nothing here
needs the SDK of Kubeflow, only the generated client of its API.
"""
