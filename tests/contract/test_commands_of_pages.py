"""Every command on every Markdown page is one that the program understands.

`CHANGELOG.md` is left out: it names commands of earlier versions too.
"""

import argparse
import importlib.util
import itertools
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from planish.__main__ import parser

REPOSITORY = Path(__file__).resolve().parents[2]
SPAN = re.compile(r"`([^`]+)`")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
PROGRAMS = {"planish", "make", "kubectl", "docker", "promtool", "amtool", "python"}
FOLDERS = tuple(
    f"{name}/" for name in ("components", "images", "manifests", "monitoring", "src", "tests")
)
ENDS = {"&&", "||", "|", ";"}


def pages():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    return sorted(set(listed.stdout.split()) - {"CHANGELOG.md"})


def commands(text):
    """Return the words of each command, and whether it stands in a block of its own.

    Example:
        >>> commands("Do `make demo SEED=1`.")
        [(['make', 'demo', 'SEED=1'], False)]
    """
    blocks = [
        (line, True)
        for block in FENCE.findall(text)
        for line in block.replace("\\\n", " ").splitlines()[1:-1]
    ]
    spans = [(" ".join(span.split()), False) for span in SPAN.findall(FENCE.sub("", text))]
    found = []
    for line, is_block in (*blocks, *spans):
        # What may be left out is written as in a usage line.
        line = re.sub(r"\[(-[^\]]*)\]", r"\1", line)
        line = re.sub(r" > \S+$", "", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quote that is none of a shell
            continue
        found += [(part, is_block) for part in split(words)]
    return found


def split(words):
    """Return the commands of a line: of a pipe, of a list, and those that `kubectl exec` runs."""
    parts = [[]]
    for word in words:
        if word in ENDS or (word == "--" and parts[-1][:1] == ["kubectl"]):
            parts.append([])
        else:
            parts[-1].append(word)
    for part in parts:
        while part and ASSIGNMENT.fullmatch(part[0]):
            part.pop(0)
        if part:
            part[0] = re.sub(r"^(\.venv/bin/)?(python|planish)3?$", r"\2", part[0])
    return [part for part in parts if part and part[0] in PROGRAMS]


def check_planish(words):
    top = parser()
    if not is_name(top, words[1:]):
        top.parse_args(words[1:])


def is_name(found, words):
    """Tell whether words only name a command, as running text does."""
    for word in words:
        groups = [a for a in found._actions if isinstance(a, argparse._SubParsersAction)]
        if not groups or word not in groups[0].choices:
            return False
        found = groups[0].choices[word]
    return True


def check_module(words, is_block, monkeypatch):
    if words[1].startswith("examples/"):
        assert (REPOSITORY / words[1]).is_file(), words
        return
    assert words[1] == "-m", words
    spec = importlib.util.find_spec(words[2])
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{words[2]}.__main__")
    if len(words) == 3 and not is_block:
        return
    if not re.search("parse_args|stage_main", Path(spec.origin).read_text()):
        assert len(words) == 3, f"{words[2]} takes no arguments"
        return
    real = argparse.ArgumentParser.parse_args

    def stop(self, *arguments, **more):
        real(self, *arguments, **more)
        raise SystemExit(0)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        # The module may have been imported by another test.
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(sys, "argv", [words[2], *words[3:]])
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(words[2], run_name="__main__")
    if ended.value.code:
        raise ended.value


def check_make(words):
    text = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) \?=", text, re.MULTILINE))
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        assert name in (variables if equals else targets), words


def check_kubectl(words):
    for option, place in itertools.pairwise(words):
        if option == "-k":
            assert (REPOSITORY / place / "kustomization.yaml").is_file(), place


def check_paths(words):
    for word in words:
        if word.startswith(FOLDERS):
            assert list(REPOSITORY.glob(word)), f"no {word}"


def test_commands_are_found_in_blocks_spans_pipes_and_pods():
    block = "A=1 planish show x | head # no\nkubectl exec p -- planish doctor > out.txt"
    text = f"`a` `make x\nY=1`\n```\n{block}\n```\n"
    assert [words for words, _ in commands(text)] == [
        ["planish", "show", "x"],
        ["kubectl", "exec", "p"],
        ["planish", "doctor"],
        ["make", "x", "Y=1"],
    ]


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_page_is_understood(page, monkeypatch, capsys):
    for words, is_block in commands((REPOSITORY / page).read_text("utf-8")):
        try:
            check_paths(words)
            if words[0] == "planish":
                check_planish(words)
            elif words[0] == "python":
                check_module(words, is_block, monkeypatch)
            elif words[0] == "make":
                check_make(words)
            elif words[0] == "kubectl":
                check_kubectl(words)
        except SystemExit:
            pytest.fail(f"{' '.join(words)}: {capsys.readouterr().err}")


def test_most_pages_hold_commands():
    found = [
        words
        for page in pages()
        for words, _ in commands((REPOSITORY / page).read_text("utf-8"))
        if words[0] in ("planish", "python", "make")
    ]
    assert len(found) > 40
