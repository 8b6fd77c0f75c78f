"""Writes the rules as PrometheusRule objects: `python -m tests.golden.write_rules`."""

from __future__ import annotations

from pathlib import Path

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
RULES = MONITORING / "rules"
TARGET = MONITORING / "kubernetes" / "prometheus-rules.yaml"


def prometheus_rules() -> str:
    """Return one object for each file of rules, for clusters with the Prometheus operator."""
    objects = [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {
                "name": f"planish-{path.stem}",
                "labels": {"app.kubernetes.io/part-of": "planish", "release": "prometheus"},
            },
            "spec": yaml.safe_load(path.read_text("utf-8")),
        }
        for path in sorted(RULES.glob("*.yaml"))
    ]
    text = yaml.safe_dump_all(objects, sort_keys=False, width=100, explicit_start=True)
    return f"# Written by `make golden` from ../rules.\n{text}"


def main() -> None:
    """Write the file."""
    TARGET.write_text(prometheus_rules(), "utf-8")


if __name__ == "__main__":
    main()
