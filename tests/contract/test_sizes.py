"""No file grows over 600 lines, no function over 80."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
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
