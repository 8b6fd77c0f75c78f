"""The service that watches jobs: Prometheus in, alerts out."""
