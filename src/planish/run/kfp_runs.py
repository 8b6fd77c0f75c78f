"""The runs of a real Kubeflow Pipelines API server."""

from __future__ import annotations

import json
import warnings
from typing import Any

from planish.run.runs import RunFacts


class KfpRuns:
    """Meets `Runs` through the client of kfp."""

    def __init__(self, **options: Any) -> None:
        """Connect; without options as the pod that this is.

        Args:
            options: of `kfp.Client`: host, namespace, credentials ...
        """
        with warnings.catch_warnings():
            # The client warns on every start that it needs a back end of version 2.
            warnings.simplefilter("ignore", FutureWarning)
            import kfp
            import kfp_server_api

            self._client = kfp.Client(**options)
        self._api = kfp_server_api
        self._runs = self._client._run_api

    def facts(self, run_id: str) -> RunFacts:
        """Return how a run was started."""
        run = self._client.get_run(run_id)
        runtime = run.runtime_config
        pipeline: dict[str, Any] = {}
        if run.pipeline_version_reference is not None:
            reference = run.pipeline_version_reference
            pipeline["pipeline_version_reference"] = {
                "pipeline_id": reference.pipeline_id,
                "pipeline_version_id": reference.pipeline_version_id,
            }
        else:
            pipeline["pipeline_spec"] = run.pipeline_spec
        return RunFacts(
            experiment_id=run.experiment_id or "",
            parameters=dict(runtime.parameters or {}) if runtime else {},
            service_account=run.service_account or "",
            pipeline_root=(runtime.pipeline_root or "") if runtime else "",
            pipeline=pipeline,
            state=str(run.state or ""),
        )

    def find(self, name: str, experiment_id: str) -> str:
        """Return the id of the run of that name; empty when there is none."""
        predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
        found = self._client.list_runs(
            page_size=1,
            experiment_id=experiment_id or None,
            filter=json.dumps({"predicates": [predicate]}),
        )
        return str(found.runs[0].run_id) if found.runs else ""

    def create(self, name: str, facts: RunFacts) -> str:
        """Start a run and return its id."""
        api = self._api
        reference = facts.pipeline.get("pipeline_version_reference")
        created = self._runs.run_service_create_run(
            run=api.V2beta1Run(
                display_name=name,
                experiment_id=facts.experiment_id or None,
                service_account=facts.service_account or None,
                pipeline_spec=facts.pipeline.get("pipeline_spec"),
                pipeline_version_reference=(
                    api.V2beta1PipelineVersionReference(**reference) if reference else None
                ),
                runtime_config=api.V2beta1RuntimeConfig(
                    parameters=dict(facts.parameters),
                    pipeline_root=facts.pipeline_root or None,
                ),
            )
        )
        return str(created.run_id)
