"""Runs from an installed package: start, schedule, watch, stop and clean them up on a cluster.

Pipelines are compiled before the package is built; nothing here needs the SDK of Kubeflow.
"""
