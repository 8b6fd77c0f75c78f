"""What is equal stands once in a compiled pipeline, and what differs stays apart."""

import copy

from pipelines.share import name_tasks_apart, share_components


def graph(*names):
    tasks = {f"task-{n}": {"componentRef": {"name": name}} for n, name in enumerate(names)}
    return {"dag": {"tasks": tasks}}


def spec_of(images, **graphs):
    """Return a pipeline with a component for each image, and graphs of them."""
    leaves = {f"comp-{name}": {"executorLabel": f"exec-{name}"} for name in images}
    executors = {f"exec-{name}": {"container": {"image": image}} for name, image in images.items()}
    components = {**leaves, **graphs}
    return {
        "components": components,
        "deploymentSpec": {"executors": executors},
        "root": graph(*graphs),
    }


def refs(node):
    return [task["componentRef"]["name"] for task in node["dag"]["tasks"].values()]


IMAGES = {"a": "x", "a-2": "x", "b": "y"}


def test_equal_graphs_of_equal_components_stand_once():
    spec = spec_of(IMAGES, one=graph("comp-a", "comp-b"), two=graph("comp-a-2", "comp-b"))
    pods = {f"exec-{name}": {"timeout": 1} for name in IMAGES}
    share_components(spec, pods)
    assert set(spec["deploymentSpec"]["executors"]) == set(pods) == {"exec-a", "exec-b"}
    assert set(spec["components"]) == {"comp-a", "comp-b", "one"}
    assert refs(spec["root"]) == ["one", "one"]
    assert refs(spec["components"]["one"]) == ["comp-a", "comp-b"]


def test_other_pod_settings_keep_components_and_their_graphs_apart():
    spec = spec_of(IMAGES, one=graph("comp-a"), two=graph("comp-a-2"))
    pods = {"exec-a": {"timeout": 1}, "exec-a-2": {"timeout": 2}, "exec-b": {}}
    before = copy.deepcopy((spec, pods))
    share_components(spec, pods)
    assert (spec, pods) == before


def test_tasks_of_an_iteration_and_what_names_them_get_its_number():
    of_task = {
        "inputs": {"artifacts": {"state": {"taskOutputArtifact": {"producerTask": "train"}}}}
    }
    after = {"dependentTasks": ["train"], "componentRef": {"name": "a"}}
    subtask = {"valueFromParameter": {"producerSubtask": "train"}}
    tasks = {"train": {"componentRef": {"name": "a"}}, "checkpoint": {**after, **of_task}}
    one = {"dag": {"tasks": tasks, "outputs": {"parameters": {"pin": subtask}}}}
    two = graph("a")
    root = {
        "iteration-12": {"componentRef": {"name": "one"}},
        "other": {"componentRef": {"name": "two"}},
    }
    spec = {"root": {"dag": {"tasks": root}}, "components": {"one": one, "two": two, "a": {}}}
    name_tasks_apart(spec)
    dag = one["dag"]
    assert list(dag["tasks"]) == ["train-i12", "checkpoint-i12"]
    last = dag["tasks"]["checkpoint-i12"]
    assert last["dependentTasks"] == ["train-i12"]
    assert last["inputs"]["artifacts"]["state"]["taskOutputArtifact"]["producerTask"] == "train-i12"
    assert (
        dag["outputs"]["parameters"]["pin"]["valueFromParameter"]["producerSubtask"] == "train-i12"
    )
    assert two == graph("a")
