"""Lint rules about graphs: 1, 2, 3, 9, 10, 11 and 13."""

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipelines.lint_expected import PIPELINES
from pipelines.lint_model import Compiled, Fault, Node, walk

MAX_STORED_BYTES = 512 * 1024
"""Half of the largest workflow object that a cluster stores (1 MiB)."""

MAX_PODS = 1000
"""Half of the pods up to which one workflow behaves well."""


def inputs_are_declared(compiled: Compiled) -> Iterator[Fault]:
    """Rule 1: what a task takes from its graph, the graph declares as an input.

    KFP 2.17 compiles resource requests from run parameters inside loops to dangling names.
    """
    for name, component, task_name, task in compiled.tasks():
        declared = component.get("inputDefinitions", {})
        where = f"{name}.{task_name}"
        wanted = list(walk(task, "componentInputParameter"))
        wanted += list(
            walk(compiled.pods.get(compiled.executor_of(task), {}), "componentInputParameter")
        )
        for parameter in sorted(set(wanted) - set(declared.get("parameters", {}))):
            yield Fault(1, where, f"parameter `{parameter}` is not an input of `{name}`")
        artifacts = set(walk(task, "componentInputArtifact"))
        for artifact in sorted(artifacts - set(declared.get("artifacts", {}))):
            yield Fault(1, where, f"artifact `{artifact}` is not an input of `{name}`")


def producers_are_upstream(compiled: Compiled) -> Iterator[Fault]:
    """Rule 2: a task that another one takes from is in the same graph and a dependency."""
    for name, component, tasks in compiled.dags():
        for task_name, task in tasks.items():
            wanted = set(walk(task.get("inputs", {}), "producerTask"))
            pod = compiled.pods.get(compiled.executor_of(task), {})
            for producer in sorted(wanted | set(walk(pod, "producerTask"))):
                where = f"{name}.{task_name}"
                if producer not in tasks:
                    yield Fault(2, where, f"producer `{producer}` is not a task of `{name}`")
                elif producer not in task.get("dependentTasks", []):
                    yield Fault(2, where, f"producer `{producer}` is not in dependentTasks")
        outputs = component["dag"].get("outputs", {})
        for producer in sorted(set(walk(outputs, "producerSubtask")) - set(tasks)):
            yield Fault(2, name, f"output comes from `{producer}`, which is not a task of it")


def stages_follow_prepare(compiled: Compiled) -> Iterator[Fault]:
    """Rule 3: no cycles; all stages exist, and all but the exit task come after the first."""
    for name, _, tasks in compiled.dags():
        edges = {task: list(entry.get("dependentTasks", [])) for task, entry in tasks.items()}
        order = _order(edges)
        if len(order) < len(tasks):
            rest = sorted(set(tasks) - set(order))
            yield Fault(3, name, f"tasks must not depend on themselves, got a cycle in {rest}")
        if compiled.expected.first_task in tasks:
            after = {compiled.expected.first_task}
            for task in order:
                if after & set(edges[task]):
                    after.add(task)
            for task in sorted(set(tasks) - after):
                yield Fault(3, f"{name}.{task}", "must come after the first stage, but does not")
    used = {compiled.executor_of(task) for _, _, _, task in compiled.tasks()}
    stages = {compiled.stage_of(label) for label in used}
    if compiled.name not in PIPELINES:
        known = sorted(PIPELINES)
        yield Fault(3, "root", f"the pipeline must be one of {known}, got {compiled.name!r}")
    for stage in sorted(compiled.expected.stages - stages):
        yield Fault(3, "root", f"stage `{stage}` must be part of the pipeline, but is not")


def _order(edges: Mapping[str, list[str]]) -> list[str]:
    """Return the tasks in an order of execution; tasks of cycles are missing from it."""
    order: list[str] = []
    waiting = dict(edges)
    while waiting:
        ready = sorted(t for t, needs in waiting.items() if not set(needs) & set(waiting))
        if not ready:
            break
        order.extend(ready)
        for task in ready:
            del waiting[task]
    return order


def arguments_fit_the_stages(compiled: Compiled) -> Iterator[Fault]:
    """Rule 9: each embedded component calls its stage with the arguments that `run` takes."""
    sources: dict[str, str] = {}
    for label, container in sorted(compiled.executors.items()):
        sources.setdefault(str(container.get("command", [""])[-1]), label)
    for source, label in sources.items():
        for message in _call_faults(source):
            yield Fault(9, label, message)
    for name, _, task_name, task in compiled.tasks():
        definition = compiled.components.get(task["componentRef"]["name"], {})
        for kind in ("parameters", "artifacts"):
            declared = definition.get("inputDefinitions", {}).get(kind, {})
            given = set(task.get("inputs", {}).get(kind, {}))
            needed = {key for key, entry in declared.items() if not entry.get("isOptional")}
            if "parameterIterator" in task:
                needed.discard(task["parameterIterator"]["itemInput"])
            for key in sorted(needed - given):
                yield Fault(9, f"{name}.{task_name}", f"input `{key}` is not given")


def _call_faults(source: str) -> list[str]:
    function = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    imports = [n for n in function.body if isinstance(n, ast.ImportFrom)]
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    calls = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "run"]
    if len(imports) != 1 or len(calls) != 1 or calls[0].args:
        return ["the body must be one import of `run` and one call of it by keywords"]
    module = str(imports[0].module)
    accepted = _signature(module)
    if accepted is None:
        return [f"`{module}` must have a function `run`, but has none"]
    faults = []
    passed = {keyword.arg: keyword.value for keyword in calls[0].keywords if keyword.arg}
    for key in sorted(set(passed) - set(accepted)):
        faults.append(f"`{module}.run` takes no argument `{key}`")
    for key in sorted(k for k, (_, required) in accepted.items() if required and k not in passed):
        faults.append(f"`{module}.run` needs the argument `{key}`, which is not passed")
    types = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation}
    for key, value in passed.items():
        if key not in accepted or not isinstance(value, ast.Name):
            continue
        ours, theirs = types.get(value.id, ""), accepted[key][0]
        if (ours in _SCALARS or theirs in _SCALARS) and ours != theirs:
            faults.append(f"`{key}` of `{module}.run` is `{theirs}`, the component has `{ours}`")
    return faults


_SCALARS = ("str", "int", "float", "bool")


def _signature(module: str) -> dict[str, tuple[str, bool]] | None:
    """Return argument name to (annotation, required) of `run`, read without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "run":
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            no_default = len(positional) - len(arguments.defaults)
            found = {a.arg: (_text(a), i < no_default) for i, a in enumerate(positional)}
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
                found[argument.arg] = (_text(argument), default is None)
            return found
    return None


def _text(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation) if argument.annotation else ""


def loops_run_over_integers(compiled: Compiled) -> Iterator[Fault]:
    """Rule 10: loops run over a list of integers, with a limit on parallel tasks."""
    for name, _, task_name, task in compiled.tasks():
        where = f"{name}.{task_name}"
        if "artifactIterator" in task:
            yield Fault(10, where, "must not loop over artifacts, the back end cannot")
        if "parameterIterator" not in task:
            continue
        raw = task["parameterIterator"].get("items", {}).get("raw")
        try:
            items = json.loads(raw)
        except (TypeError, ValueError):
            items = None
        if not isinstance(items, list) or not all(type(item) is int for item in items):
            yield Fault(10, where, f"must loop over a list of integers, got {raw!r}")
        limit = task.get("iteratorPolicy", {}).get("parallelismLimit", 0)
        if limit < 1:
            yield Fault(10, where, f"must have a parallelism limit, got {limit}")


def stored_bytes(compiled: Compiled) -> int:
    """Return the size of the workflow object before any status, in bytes of compact JSON.

    The back end stores equal component and container specifications once, by their digest.
    """

    def compact(node: Node) -> str:
        return json.dumps(node, separators=(",", ":"), sort_keys=True)

    once = {compact(c) for c in (*compiled.components.values(), *compiled.executors.values())}
    return sum(map(len, once)) + sum(len(compact(pod)) for pod in compiled.pods.values())


def pods_of(compiled: Compiled, name: str = "root") -> int:
    """Return how many pods one attempt of a graph makes: two a task, one a graph or loop turn."""
    total = 1
    for task in compiled.components[name]["dag"].get("tasks", {}).values():
        child = task["componentRef"]["name"]
        turns = 1
        if "parameterIterator" in task:
            turns = len(json.loads(task["parameterIterator"]["items"]["raw"]))
            total += 1
        inner = pods_of(compiled, child) if "dag" in compiled.components[child] else 2
        total += turns * inner
    return total


def size_is_within_limits(compiled: Compiled) -> Iterator[Fault]:
    """Rule 11: the workflow object and its number of pods keep a margin of two."""
    size = stored_bytes(compiled)
    if size > MAX_STORED_BYTES:
        yield Fault(11, "root", f"must store at most {MAX_STORED_BYTES} bytes, got {size}")
    try:
        pods = pods_of(compiled)
    except (KeyError, TypeError, ValueError, RecursionError):
        return  # A graph that cannot be counted breaks rules 1, 2 or 10 already.
    if pods > MAX_PODS:
        yield Fault(11, "root", f"must make at most {MAX_PODS} pods, got {pods}")


def parameters_are_public(compiled: Compiled) -> Iterator[Fault]:
    """Rule 13: the run form has exactly the public parameters, each described."""
    found = compiled.components["root"].get("inputDefinitions", {}).get("parameters", {})
    public = compiled.expected.parameters
    for name in sorted(set(found) ^ set(public)):
        word = "is not public" if name in found else "is missing"
        yield Fault(13, "root", f"parameter `{name}` {word}")
    for name in sorted(set(found) & set(public)):
        kind = found[name].get("parameterType")
        if kind != public[name]:
            yield Fault(13, "root", f"`{name}` must be {public[name]}, got {kind}")
        if not found[name].get("description", "").strip():
            yield Fault(13, "root", f"`{name}` must have a description, but has none")
