"""Commands for runs on a cluster: start, schedule, watch, stop and clean up.

The package contains compiled pipelines, so nothing here needs the SDK of Kubeflow.
"""
