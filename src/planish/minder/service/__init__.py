"""The service that watches jobs: it reads Prometheus and raises alerts."""
