"""The house stays one in which a reader finds a room: few entries, few files, no circles."""

import ast
import graphlib
import re
from collections import Counter
from pathlib import Path

import pytest

from planish.base.config import preset_names

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src/planish"
MAX_ENTRIES = 16
PAGE_LINES = {"README.md": 90, "docs": 150}
MAX_CELL = 120
FOLDERS = "src|components|pipelines|images|manifests|monitoring|tests|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[^`\s*<>{{}}]*)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:\]\(|src=\")([^)\"#:]+)(?:#[^)\"]*)?[)\"]")


CEILINGS = {
    "algorithms": 5_410,
    "base": 8_060,
    "checkpoint": 67_750,
    "engines": 47_090,
    "minder": 47_730,
    "models": 14_400,
    "records": 9_260,
    "run": 12_450,
    "show": 8_430,
    "stages": 80_030,
    "store": 10_640,
    "submit": 11_430,
    "verifiers": 12_150,
    "components": 2_400,
    "pipelines": 6_200,
}
"""Content that a room may have: nodes of its syntax trees without docstrings. Lines are not
counted, since they can be met by squeezing. Who adds to a full room makes space in it first."""


def code():
    for folder in (PACKAGE, REPOSITORY / "components", REPOSITORY / "pipelines"):
        yield from sorted(folder.rglob("*.py"))


def content_of(text):
    """Return the nodes of a syntax tree, without docstrings and contexts of names."""
    tree = ast.parse(text)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for inner in ast.walk(node)
    }
    return sum(
        id(node) not in skipped and not isinstance(node, ast.expr_context)
        for node in ast.walk(tree)
    )


def module_of(path):
    base = PACKAGE.parent if PACKAGE in path.parents else REPOSITORY
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_package_has_few_entries():
    entries = [p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


@pytest.mark.parametrize("room", sorted(CEILINGS))
def test_a_room_stays_below_its_ceiling(room):
    folder = REPOSITORY / room if room in ("components", "pipelines") else PACKAGE / room
    content = sum(content_of(path.read_text()) for path in folder.rglob("*.py"))
    assert content <= CEILINGS[room], "make room first, or say in the commit why it must grow"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a = b", 4), ('"""Say."""\n\n\na = b', 4), ("a, b = c, d", 8), ("a = c\nb = d", 7)],
)
def test_content_counts_neither_lines_nor_docstrings(text, expected):
    assert content_of(text) == expected


def test_every_room_has_a_ceiling():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms | {"components", "pipelines"} == set(CEILINGS)


def test_no_folder_is_crowded():
    files = Counter(
        path.parent.relative_to(REPOSITORY).as_posix()
        for path in code()
        if path.name not in ("__init__.py", "__main__.py")
    )
    crowded = {name: n for name, n in files.items() if n > MAX_ENTRIES and name != "components"}
    assert crowded == {}


def imports_of(tree, modules):
    """Return the modules of ours that run with a file, also those imported inside functions."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            # A package that only gives way to its modules is no use of the package.
            found |= inner if len(inner) == len(node.names) else inner | {node.module}
    return found & modules


def cycle_in(graph):
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    trees = {module_of(path): ast.parse(path.read_text("utf-8")) for path in code()}
    graph = {name: imports_of(tree, set(trees)) - {name} for name, tree in trees.items()}
    assert sum(map(len, graph.values())) > 500
    assert cycle_in(graph) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from a import b", {"a.b"}),
        ("from a import b, other", {"a", "a.b"}),
        ("def f():\n    import c", {"c"}),
        ("if TYPE_CHECKING:\n    import c", set()),
        ("import numpy", set()),
    ],
)
def test_the_check_sees_imports_in_functions_and_none_for_types(text, expected):
    assert imports_of(ast.parse(text), {"a", "a.b", "c"}) == expected


def test_the_check_sees_a_circle():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    assert cycle_in({"a": {"b"}, "b": {"c"}, "d": {"a"}}) == []


def test_no_call_unpacks_a_tuple_that_stands_there():
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in code()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
    ]
    assert found == []


def pages():
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def test_pages_are_short():
    long = {}
    for page in pages():
        limit = PAGE_LINES.get(page.name, PAGE_LINES["docs"])
        lines = page.read_text("utf-8").splitlines()
        if len(lines) > limit and page.name not in ("results.md", "configuration.md"):
            long[page.name] = len(lines)
    assert long == {}


def test_no_cell_of_the_front_page_is_long():
    rows = (REPOSITORY / "README.md").read_text("utf-8").splitlines()
    cells = [cell.strip() for row in rows if row.startswith("|") for cell in row.split("|")]
    assert [cell for cell in cells if len(cell) > MAX_CELL] == []


def test_the_front_page_names_every_preset_or_its_algorithm_and_form():
    named = set(re.findall(r"`([\w.-]+)`", (REPOSITORY / "README.md").read_text("utf-8")))
    missing = [
        name
        for name in preset_names()
        if name not in named and not set(name.replace("-", " -").split()) <= named
    ]
    assert missing == []


def test_every_file_that_a_page_names_exists():
    missing = []
    for page in pages():
        text = FENCE.sub("", page.read_text("utf-8"))
        named = [REPOSITORY / path for path in PATH.findall(text)]
        named += [page.parent / link for link in LINK.findall(text)]
        missing += [f"{page.name}: {path}" for path in named if not path.exists()]
    assert missing == []


MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
CODE = ("src", "components", "pipelines")


def files(*folders):
    found = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert len(found) > 10
    return found


def long_functions(text):
    """Return the names of functions over the limit, decorators included."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines = (node.end_lineno or first) - first + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name} ({lines})")
    return found


def test_no_file_is_over_the_limit():
    lengths = {
        str(path.relative_to(REPOSITORY)): len(path.read_text("utf-8").splitlines())
        for path in files(*CODE, "tests")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_over_the_limit():
    long = {
        str(path.relative_to(REPOSITORY)): found
        for path in files(*CODE)
        if (found := long_functions(path.read_text("utf-8")))
    }
    assert long == {}


@pytest.mark.parametrize(("lines", "expected"), [(78, []), (79, ["f (81)"])])
def test_the_check_counts_the_decorator_and_the_signature(lines, expected):
    assert long_functions("@x\ndef f():\n" + "    pass\n" * lines) == expected


def test_no_catch_all_file_names():
    names = {path.stem for path in files(*CODE)}
    assert names & {"utils", "util", "helpers", "misc", "common", "manager"} == set()


def test_sources_are_ascii_where_they_are_code():
    strange = []
    for path in files(*CODE):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
                doc = ast.get_docstring(node, clean=False) or ""
                if not doc.isascii():
                    strange.append(f"{path.relative_to(REPOSITORY)}: {doc[:40]!r}")
    assert strange == []
