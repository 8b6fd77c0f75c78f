"""Commands for runs on a cluster: start, schedule, watch, stop and clean up.

The package contains compiled pipelines, so it does not need the SDK of Kubeflow.
"""
