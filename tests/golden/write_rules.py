"""Writes what the Prometheus operator loads, from what a server without it loads.

`python -m tests.golden.write_rules`
"""

import copy
import re
from pathlib import Path

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
RULES = MONITORING / "rules"
TARGET = MONITORING / "kubernetes" / "prometheus-rules.yaml"
SCRAPING = MONITORING / "prometheus.yaml"
MONITORS = MONITORING / "kubernetes" / "pod-monitors.yaml"


def prometheus_rules() -> str:
    """Return one object for each file of rules, for clusters with the Prometheus operator."""
    objects = [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": _metadata(path.stem),
            "spec": yaml.safe_load(path.read_text("utf-8")),
        }
        for path in sorted(RULES.glob("*.yaml"))
    ]
    return f"# Written by `make golden` from ../rules.\n{_dumped(objects)}"


def pod_monitors() -> str:
    """Return one object for each job of the scrape configuration that looks for pods.

    The operator has labels of its own before ours are set: `job` would be `namespace/name`.
    """
    config = yaml.safe_load(SCRAPING.read_text("utf-8"))
    objects = []
    for job in config["scrape_configs"]:
        if "kubernetes_sd_configs" not in job:
            continue
        rules = [_in_camel_case(rule) for rule in job["relabel_configs"]]
        endpoint = {
            "honorLabels": job.get("honor_labels", False),
            "interval": job.get("scrape_interval", config["global"]["scrape_interval"]),
            "relabelings": [*rules, {"targetLabel": "job", "replacement": job["job_name"]}],
        }
        if "scrape_timeout" in job:
            endpoint["scrapeTimeout"] = job["scrape_timeout"]
        if "metric_relabel_configs" in job:
            kept = [_in_camel_case(rule) for rule in job["metric_relabel_configs"]]
            endpoint["metricRelabelings"] = kept
        objects.append(
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "PodMonitor",
                "metadata": _metadata(job["job_name"]),
                "spec": {
                    "namespaceSelector": {"any": True},
                    "selector": {},
                    "podMetricsEndpoints": [endpoint],
                },
            }
        )
    return f"# Written by `make golden` from ../prometheus.yaml.\n{_dumped(objects)}"


def _metadata(name: str) -> dict[str, object]:
    labels = {"app.kubernetes.io/part-of": "planish", "release": "prometheus"}
    return {"name": f"planish-{name}", "labels": labels}


def _in_camel_case(rule: dict[str, object]) -> dict[str, object]:
    return {
        re.sub("_(.)", lambda found: found[1].upper(), name): copy.copy(value)
        for name, value in rule.items()
    }


def _dumped(objects: list[dict[str, object]]) -> str:
    return yaml.safe_dump_all(objects, sort_keys=False, width=100, explicit_start=True)


def main() -> None:
    """Write the files."""
    TARGET.write_text(prometheus_rules(), "utf-8")
    MONITORS.write_text(pod_monitors(), "utf-8")


if __name__ == "__main__":
    main()
