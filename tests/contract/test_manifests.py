"""Manifests: overlays resolve, references hold, pods are safe, steps fit the stages."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from components.images import (
    GPU,
    GPU_NODE_LABEL,
    IMAGES,
    METRICS_PORT,
    PROFILES,
    STAGE_IMAGES,
)
from components.pod_settings import (
    FIELD_ENV,
    GPU_ENV,
    RANKS_ENV,
    SAMPLING_STAGES,
    SECRET_ENV,
    STAGE_LABEL,
    WEBHOOK_ENV,
)
from planish.__main__ import main
from planish.minder.act.kube.names import ITERATION_LABEL
from planish.run.__main__ import stage_run
from planish.run.gang.cluster import PERMISSIONS as GANG_PERMISSIONS
from planish.run.gang.cluster import TRAINER_PERMISSIONS
from planish.run.gang.manifests import GRACE_SECONDS, LONGEST_SECONDS
from planish.run.stage import stage_parser
from planish.run.stage_metrics import NUM_PORTS
from planish.stages.prepare.cluster import CLUSTER_PERMISSIONS, PERMISSIONS, RUNTIME_PERMISSION
from tests.contract.kfp_needs import NEEDS
from tests.contract.pipeline_rules import OPTIONAL_STAGES, RESHARD_STAGES, walk
from tests.unit.engines.deploy.plans import tiny_plan

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "manifests"
OVERLAYS = ("overlays/local", "overlays/gpu")
KUBEFLOW_OVERLAYS = ("overlays/kfp-single-user", "overlays/kfp-multi-user")
LAUNCHER = "kfp-launcher.yaml"
"""A patch of an object of Kubeflow's own, which nothing may apply."""
WORKLOADS = ("Deployment", "Job")


def load(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def resolve(folder):
    """Return all objects of a kustomization, its patches merged and its secrets generated."""
    (kustomization,) = load(folder / "kustomization.yaml")
    objects = []
    for name in kustomization.get("resources", []):
        path = folder / name
        objects += resolve(path.resolve()) if path.is_dir() else load(path)
    for generator in kustomization.get("secretGenerator", []):
        lines = [
            line for env in generator["envs"] for line in (folder / env).read_text().splitlines()
        ]
        data = dict(line.split("=", 1) for line in lines)
        metadata = {"name": generator["name"]}
        objects.append({"kind": "Secret", "metadata": metadata, "stringData": data})
    for patch in kustomization.get("patches", []):
        for change in load(folder / patch["path"]):
            merge(find(objects, change["kind"], change["metadata"]["name"]), change)
    return objects


def merge(target, change):
    """Lay a strategic merge patch over an object; lists merge by name."""
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                named = [t for t in target.get(key, []) if t.get("name") == item.get("name")]
                if named:
                    merge(named[0], item)
                else:
                    target.setdefault(key, []).append(item)
        elif value is None:
            target.pop(key, None)
        else:
            target[key] = value


def find(objects, kind, name):
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    assert len(found) == 1, (kind, name, len(found))
    return found[0]


def names(objects, kind):
    return {o["metadata"]["name"] for o in objects if o["kind"] == kind}


def pods(objects):
    """Yield (object, pod spec) for every workload."""
    for item in objects:
        if item["kind"] in WORKLOADS:
            yield item, item["spec"]["template"]["spec"]


def launcher_settings():
    """Return what the patch adds to the settings of Kubeflow's launcher."""
    ((_, added),) = load(FOLDER / "runs" / LAUNCHER)
    assert (added["op"], added["path"]) == ("add", "/data/providers")
    return yaml.safe_load(added["value"])


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request):
    return resolve(FOLDER / request.param)


def test_every_file_of_a_folder_belongs_to_its_kustomization():
    for path in FOLDER.rglob("kustomization.yaml"):
        (kustomization,) = load(path)
        named = set(kustomization.get("resources", []))
        named |= {patch["path"] for patch in kustomization.get("patches", [])}
        files = {p.name for p in path.parent.glob("*.yaml")} - {"kustomization.yaml", LAUNCHER}
        assert files == {name for name in named if name.endswith(".yaml")}, path


def test_no_object_is_there_twice(objects):
    keys = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))


def test_service_accounts_config_maps_and_claims_that_are_named_exist(objects):
    accounts = {"default", *names(objects, "ServiceAccount")}
    for item, pod in pods(objects):
        assert pod["serviceAccountName"] in accounts, item["metadata"]["name"]
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names(objects, "ConfigMap")
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in names(objects, "PersistentVolumeClaim")
    for item in objects:
        if item["kind"].endswith("RoleBinding"):
            reference = item["roleRef"]
            assert reference["name"] in names(objects, reference["kind"])
            assert {s["name"] for s in item["subjects"]} <= accounts


def test_secrets_that_are_named_have_the_keys_that_are_read():
    objects = resolve(FOLDER / "overlays/local")
    secrets = {o["metadata"]["name"]: o["stringData"] for o in objects if o["kind"] == "Secret"}
    for reference in walk(objects, "secretKeyRef"):
        assert reference["key"] in secrets[reference["name"]]
    assert set(SECRET_ENV) == set(secrets["planish-store"])


def test_services_reach_a_named_port_of_pods_with_their_labels(objects):
    for service in (o for o in objects if o["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        ports = {
            port["name"]
            for item, pod in pods(objects)
            if selector <= item["spec"]["template"]["metadata"]["labels"].items()
            for container in pod["containers"]
            for port in container.get("ports", [])
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_pods_run_without_privileges_and_within_limits(objects):
    for _, pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            for kind in ("requests", "limits"):
                assert set(container["resources"][kind]) == {"cpu", "memory"}


def test_servers_have_probes(objects):
    for item, pod in pods(objects):
        if item["kind"] == "Deployment":
            for container in pod["containers"]:
                assert {"readinessProbe", "livenessProbe"} <= set(container)


def test_images_of_ours_are_tagged_in_one_place():
    """Those of others stand with their digests where they are used."""
    for folder in ("base", "base/minder"):
        (kustomization,) = load(FOLDER / folder / "kustomization.yaml")
        tagged = {image["name"]: image["newTag"] for image in kustomization.get("images", ())}
        used = {c["image"] for _, pod in pods(resolve(FOLDER / folder)) for c in pod["containers"]}
        assert {image for image in used if "@sha256:" not in image} == set(tagged)
        assert all(tag != "latest" for tag in tagged.values())


def test_replacements_point_at_things_that_exist():
    (kustomization,) = load(FOLDER / "base/kustomization.yaml")
    objects = resolve(FOLDER / "base")
    for replacement in kustomization["replacements"]:
        source = replacement["source"]
        data = find(objects, source["kind"], source["name"])
        assert source["fieldPath"].removeprefix("data.") in data["data"]
        for target in replacement["targets"]:
            item = find(objects, target["select"]["kind"], target["select"]["name"])
            (path,) = target["fieldPaths"]
            variable = re.search(r"env\.\[name=(\w+)\]", path)[1]
            assert variable in {e["name"] for e in next(walk(item, "env"))}


def test_the_launcher_of_kubeflow_uses_our_bucket_secret_and_service():
    objects = resolve(FOLDER / "overlays/local")
    (ours,) = launcher_settings()["s3"]["overrides"]
    assert ours["bucketName"] == find(objects, "ConfigMap", "planish-install")["data"]["bucket"]
    reference = ours["credentials"]["secretRef"]
    secret = find(objects, "Secret", reference["secretName"])
    assert {reference["accessKeyKey"], reference["secretKeyKey"]} <= set(secret["stringData"])
    host = ours["endpoint"].removeprefix("http://")
    assert host == secret["stringData"]["endpoint"]
    assert host.split(".")[0] in names(objects, "Service")


def test_the_role_of_runs_grants_exactly_what_the_code_asks_for():
    objects = resolve(FOLDER / "base")

    def granted(kind, name):
        return {
            (group, resource, verb)
            for rule in find(objects, kind, name)["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    asked = {(p.group, p.resource, p.verb) for p in PERMISSIONS}
    kubeflow = {(need.group, need.resource, need.verb) for need in NEEDS}
    assert granted("Role", "planish-runner") == asked | kubeflow | {
        *GANG_PERMISSIONS,
        *TRAINER_PERMISSIONS,
    }
    everywhere = {(p.group, p.resource, p.verb) for p in (*CLUSTER_PERMISSIONS, RUNTIME_PERMISSION)}
    assert granted("ClusterRole", "planish-node-reader") == everywhere
    operator = {("batch", "jobs", v) for v in ("list", "delete")}
    operator |= {("", "services", v) for v in ("list", "delete")}
    operator |= {("trainer.kubeflow.org", "trainjobs", v) for v in ("list", "delete")}
    assert granted("Role", "planish-operator") == operator


def test_the_client_calls_in_the_code_are_those_that_the_roles_grant():
    code = (REPOSITORY / "src/planish/stages/prepare/cluster.py").read_text()
    code += (REPOSITORY / "src/planish/submit/cleanup.py").read_text()
    called = set(re.findall(r"(?:\bcore|\bcustom|Api\(.*?\))\.([a-z]+_[a-z_]+)", code))
    assert called == {
        "create_self_subject_access_review",  # every account may ask about itself
        "list_namespaced_resource_quota",
        "list_node",
        "list_namespaced_custom_object",
        "get_cluster_custom_object",
        "read_namespaced_config_map",
        "delete_namespaced_custom_object",
        "list_namespaced_service",
        "delete_namespaced_service",
    }


GANG_CALLS = {
    "create_namespaced_custom_object": ("batch", "jobs", "create"),
    "get_namespaced_custom_object": ("batch", "jobs", "get"),
    "list_namespaced_custom_object": ("batch", "jobs", "watch"),
    "patch_namespaced_custom_object": ("batch", "jobs", "patch"),
    "delete_namespaced_custom_object": ("batch", "jobs", "delete"),
    "create_namespaced_service": ("", "services", "create"),
    "read_namespaced_service": ("", "services", "get"),
    "read_namespaced_pod": ("", "pods", "get"),
    "list_namespaced_pod": ("", "pods", "list"),
    "read_namespaced_pod_log": ("", "pods/log", "get"),
}
"""Method of the client to group, resource and verb; jobs are watched, and never listed."""


def test_the_rights_of_gangs_are_those_of_their_client_calls():
    code = (REPOSITORY / "src/planish/run/gang/cluster.py").read_text()
    called = set(re.findall(r"self\.(?:core|custom)\.([a-z_]+)", code))
    assert called == set(GANG_CALLS)
    assert set(GANG_PERMISSIONS) == set(GANG_CALLS.values())
    assert len(GANG_PERMISSIONS) == len(GANG_CALLS)


def test_a_gang_of_kubeflow_trainer_ends_within_a_day_and_replaces_no_pod():
    (runtime,) = load(FOLDER / "trainer/runtime.yaml")
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["node"]
    spec = jobs[0]["template"]["spec"]
    assert spec["activeDeadlineSeconds"] == LONGEST_SECONDS
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == GRACE_SECONDS


WORKFLOW = load(FOLDER / "argo/post-train.yaml")[0]
TEMPLATES = {template["name"]: template for template in WORKFLOW["spec"]["templates"]}
STEPS = sorted(name for name, template in TEMPLATES.items() if "container" in template)


def stage_of(step):
    return step.replace("-", "_")


def test_the_workflow_has_every_stage_but_the_chain_and_blocks_of_iterations():
    others = {"next", "iterate", *RESHARD_STAGES}
    assert {stage_of(name) for name in STEPS} == {*STAGE_IMAGES} - others
    assert WORKFLOW["spec"]["onExit"] == "report"
    account = WORKFLOW["spec"]["serviceAccountName"]
    assert account in names(resolve(FOLDER / "base"), "ServiceAccount")
    assert WORKFLOW["spec"]["podMetadata"]["labels"]["pipeline/runid"] == "{{workflow.name}}"


@pytest.mark.parametrize("name", STEPS)
def test_the_command_line_of_a_step_fits_its_stage(name):
    container = TEMPLATES[name]["container"]
    assert container["command"][:2] == ["python", "-m"]
    assert container["command"][2] == "planish.run"
    run = stage_run(container["command"][3])
    sample = {"true": "true", "false": "false"}
    words = []
    for argument in container["args"]:
        option, _, value = argument.partition("=")
        kind = stage_kind(run, option)
        filled = re.sub(r"\{\{.*?\}\}", "false" if kind == "bool" else "3", value)
        words.append(f"{option}={sample.get(filled, filled)}")
    parsed = stage_parser(run).parse_args(words)
    assert parsed.root == "3"


def stage_kind(run, option):
    action = stage_parser(run)._option_string_actions[option]
    return "bool" if getattr(action.type, "__name__", "") == "_parse_bool" else "other"


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_image_secret_limits_and_retries(name):
    template = TEMPLATES[name]
    container = template["container"]
    assert container["image"] == IMAGES[STAGE_IMAGES[stage_of(name)]]
    secrets = {e["name"] for e in container["env"] if "secretKeyRef" in e.get("valueFrom", {})}
    of_stage = {"report": WEBHOOK_ENV, **dict.fromkeys(SAMPLING_STAGES, RANKS_ENV)}.get(name, {})
    assert secrets == {*SECRET_ENV.values(), *of_stage.values()}
    assert container["resources"]["limits"]["memory"]
    assert template["activeDeadlineSeconds"] > 0
    if name in ("prepare", "report"):
        assert "retryStrategy" not in template
    else:
        assert "asInt(lastRetry.exitCode) != 2" in template["retryStrategy"]["expression"]
        assert template["retryStrategy"]["affinity"] == {"nodeAntiAffinity": {}}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_knows_its_run_its_node_and_its_pod(name):
    """Without the name of its pod, the train stage can own no gang."""
    env = {entry["name"]: entry for entry in TEMPLATES[name]["container"]["env"]}
    fields = {
        key: env[key]["valueFrom"]["fieldRef"]["fieldPath"] for key in FIELD_ENV if key != "RUN_ID"
    }
    assert {**fields, "RUN_ID": FIELD_ENV["RUN_ID"]} == FIELD_ENV
    # As the label that its pods get from the workflow.
    assert env["RUN_ID"]["value"] == WORKFLOW["spec"]["podMetadata"]["labels"]["pipeline/runid"]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_found_by_the_monitoring_server(name):
    template = TEMPLATES[name]
    labels = template["metadata"]["labels"]
    inputs = {p["name"] for p in template.get("inputs", {}).get("parameters", [])}
    iteration = "{{inputs.parameters.number}}" if "number" in inputs else "0"
    assert labels == {STAGE_LABEL: stage_of(name), ITERATION_LABEL: iteration}
    env = {entry["name"]: entry.get("value") for entry in template["container"]["env"]}
    assert env["PLANISH_METRICS_PORT"] == str(METRICS_PORT)


def test_optional_stages_run_only_where_a_parameter_asks_for_them():
    tasks = TEMPLATES["iteration"]["dag"]["tasks"]
    (task,) = [t for t in tasks if stage_of(t["template"]) in OPTIONAL_STAGES]
    assert task["when"] == "'{{workflow.parameters.monitor}}' != ''"
    assert task["depends"] == "reward"
    given = {p["name"]: p.get("value") for p in WORKFLOW["spec"]["arguments"]["parameters"]}
    assert given["monitor"] == ""
    assert not [t for t in tasks if "monitor-check" in t.get("depends", "")]
    template = TEMPLATES["monitor-check"]
    words = dict(w.split("=", 1) for w in template["container"]["args"])
    assert int(words["--watch-seconds"]) < template["activeDeadlineSeconds"]


def test_the_monitoring_server_may_reach_the_ports_of_stages_and_ranks():
    policy = find(resolve(FOLDER / "base"), "NetworkPolicy", "stages-from-monitoring")
    assert policy["spec"]["podSelector"]["matchExpressions"] == [
        {"key": STAGE_LABEL, "operator": "Exists"}
    ]
    (port,) = policy["spec"]["ingress"][0]["ports"]
    assert (port["port"], port["endPort"]) == (METRICS_PORT, METRICS_PORT + NUM_PORTS - 1)


def test_tasks_name_templates_and_give_exactly_their_inputs():
    for template in TEMPLATES.values():
        for task in template.get("dag", {}).get("tasks", []):
            called = TEMPLATES[task["template"]]
            wanted = {p["name"] for p in called.get("inputs", {}).get("parameters", [])}
            given = {p["name"] for p in task.get("arguments", {}).get("parameters", [])}
            assert given == wanted, task["name"]


def test_outputs_that_tasks_take_exist():
    for template in TEMPLATES.values():
        tasks = {t["name"]: t for t in template.get("dag", {}).get("tasks", [])}
        text = yaml.safe_dump(template)
        for name, output in re.findall(r"tasks\.([\w-]+)\.outputs\.parameters\.([\w-]+)", text):
            made = TEMPLATES[tasks[name]["template"]]["outputs"]["parameters"]
            assert output in {p["name"] for p in made}
        for parameter in re.findall(r"workflow\.parameters\.([\w-]+)", text):
            known = {p["name"] for p in WORKFLOW["spec"]["arguments"]["parameters"]}
            assert parameter in known


def test_images_readme_and_dockerfiles_are_in_step():
    folder = REPOSITORY / "images"
    files = {path.name.removesuffix(".Dockerfile") for path in folder.glob("*.Dockerfile")}
    assert files == set(IMAGES)
    text = (folder / "README.md").read_text()
    for name in IMAGES:
        stages = [stage for stage, image in STAGE_IMAGES.items() if image == name]
        assert re.search(rf"\| `{name}` \| .* \| {', '.join(stages)} \|", text)


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_images_run_as_a_number_and_take_another_base(name):
    text = (REPOSITORY / f"images/{name}.Dockerfile").read_text()
    assert re.search(r"^USER 65532:65532$", text, re.M)
    assert re.search(r"^ENTRYPOINT \[\]$", text, re.M)
    assert "FROM ${BASE}" in text
    assert "PYTHONUNBUFFERED=1" in text
    extras = re.search(r'"/build\[([a-z,]+)\]"', text)[1].split(",")
    assert "pipelines" in extras
    assert re.search(
        rf"\| `{name}` \| {', '.join(extras)} \|", (REPOSITORY / "images/README.md").read_text()
    )


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here")
@pytest.mark.parametrize("overlay", [*OVERLAYS, *KUBEFLOW_OVERLAYS])
def test_kustomize_itself_builds_the_same_objects(overlay):
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Behind a dot stands the namespace, which only kustomize fills in.
    found, ours = (
        {(o["kind"], o["metadata"]["name"].partition(".")[0]) for o in objects}
        for objects in (yaml.safe_load_all(built), resolve(FOLDER / overlay))
    )
    assert found == ours


def test_ranks_of_a_plan_have_the_settings_of_every_other_pod(tmp_path):
    """Their command is in the package, which does not know the tables of the components."""
    plan, out = tiny_plan(tmp_path), tmp_path / "ranks.yaml"
    words = [str(plan), "--image", IMAGES["rollout"], "--anyway", "--kind", "statefulset"]
    assert main(["rollout", "manifests", *words, "--out", str(out)]) == 0
    objects = load(out)
    resources = PROFILES["gpu-1x8"].stages["rollout"]
    for one in (o for o in objects if o["kind"] == "StatefulSet"):
        pod = one["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        minder = find(resolve(FOLDER / "base/minder"), "Deployment", "minder")
        beside = minder["spec"]["template"]["spec"]
        assert pod["securityContext"] == beside["securityContext"]
        assert container["securityContext"] == beside["containers"][0]["securityContext"]
        assert pod["nodeSelector"] == dict([GPU_NODE_LABEL])
        assert pod["tolerations"] == [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
        assert container["resources"] == {
            "requests": {"cpu": resources.cpu, "memory": resources.memory},
            "limits": {"memory": resources.memory, GPU: resources.gpus},
        }
        (shm,) = [v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm"]
        assert shm == {"medium": "Memory", "sizeLimit": resources.shared_memory}
        env = {e["name"]: e for e in container["env"]}
        assert GPU_ENV.items() <= {n: e.get("value") for n, e in env.items()}.items()
        for key, variable in {**SECRET_ENV, **RANKS_ENV}.items():
            reference = env[variable]["valueFrom"]["secretKeyRef"]
            assert (reference["name"], reference["key"]) == ("planish-store", key)
    (policy,) = [o for o in objects if o["kind"] == "NetworkPolicy"]
    callers = policy["spec"]["ingress"][0]["from"]
    assert {c["podSelector"]["matchExpressions"][0]["key"] for c in callers} == {STAGE_LABEL}
    minio = find(resolve(FOLDER / "base"), "NetworkPolicy", "minio-from-runs")
    namespaces = [c.get("namespaceSelector") for c in callers]
    assert namespaces == [c.get("namespaceSelector") for c in minio["spec"]["ingress"][0]["from"]]
