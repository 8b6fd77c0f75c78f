"""Markdown artifacts are plain CommonMark with tables: the viewer of Kubeflow parses no HTML.

Source: kubeflow/pipelines, frontend/src/components/viewers/MarkdownViewer.tsx
(`disableParsingRawHTML`).
"""

import re

import pytest
from markdown_it import MarkdownIt

from planish import store
from planish.checkpoint.reshard.retain import apply_retention
from planish.records import layout
from planish.stages.prepare.chain import Link
from planish.stages.prepare.cluster import retries_under
from planish.stages.prepare.plan import RunPlan, render
from planish.stages.prepare.run_file import RunFile, StartPins
from planish.stages.report.gather import gather
from planish.stages.report.page import build_page
from planish.stages.report.render import render_markdown
from tests.unit.checkpoint.written import tiny_model, write_checkpoint
from tests.unit.stages.curate.test_curate_stage import curate
from tests.unit.stages.report.synthetic_run import build_run
from tests.unit.stages.report.test_report_page import hostile_facts
from tests.unit.stages.reshard.test_stages import Bench


def parsed(markdown, *, html=False):
    return (
        MarkdownIt("commonmark", {"html": html})
        .enable("table")
        .disable("text_join")
        .parse(markdown)
    )


def faults(markdown):
    """Return what a viewer without HTML would show otherwise than it is meant."""
    found = []
    for block in parsed(markdown, html=True):
        for token in (block, *(block.children or [])):
            if token.type in ("html_block", "html_inline"):
                found.append(f"html {token.content}")
            elif token.type in ("em_open", "link_open", "image"):
                found.append(f"{token.type} in {block.content}")
            elif token.type == "text_special" and token.info == "entity":
                found.append(f"entity {token.markup}")
            elif token.type == "text" and re.search(r"\w_\w", token.content):
                found.append(f"no backticks around {token.content}")
    return found


def codes(markdown):
    inline = (token for block in parsed(markdown) for token in block.children or [])
    return [token.content for token in inline if token.type == "code_inline"]


@pytest.mark.parametrize(
    "text", ["<br>", "a &#42; b", "a &lt; b", "side_is_full", "*a*", "<code>x</code>", "[a](b)"]
)
def test_the_check_sees_what_the_viewer_shows_wrongly(text):
    assert faults(f"# x\n\n{text}\n")
    assert not faults(f"# x\n\n| a |\n| --- |\n| `{text}` |\n")


def test_the_curation_report_is_clean_and_shows_the_data_as_it_is(tmp_path):
    rows = [f'{{"question": "<b>*{i}*</b> & `a|b` &#42;", "answer": "{i % 7}"}}' for i in range(60)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([*rows, rows[0]]))
    table = {"dataset": str(data), "num_prompts": 20, "evaluation_size": 8, "num_traces": 0}
    root, _, _ = curate(tmp_path, table)
    markdown = store.read(layout.curation_report(root)).decode()
    assert faults(markdown) == []
    assert "held_out" in codes(markdown)
    assert any("*</b> & `a|b` &#42;" in code for code in codes(markdown))


OFF = "spec: {templateDefaults: {retryStrategy: {retryPolicy: OnError}}}"


def test_the_plan_of_a_run_is_clean():
    pins = StartPins()
    config = {
        "model": {"path": "OWNER/my_model"},
        "rollout": {"prompts_per_iteration": 8, "group_size": 8},
        "train": {"num_passes": 1, "rollouts_per_minibatch": 32},
        "algorithm": {"name": "vc_ppo", "kl_coefficient": 0.1},
    }
    run = RunFile(config, "0", "s3://b/a_b", pins, pins)
    plan = RunPlan(
        "s3://b/my_run", run, Link(1, 2, 2), 2, is_new=False, newest_version=None,
        changed=("train.learning_rate: 1 -> 2",), warnings=("a `node_x` must exist",),
        away_from=("node_a",), retries=retries_under({"workflowDefaults": OFF}),
    )  # fmt: skip
    assert faults(render(plan)) == []


@pytest.mark.slow
@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED"])
def test_the_summary_of_a_run_is_clean(state, tmp_path):
    root = f"file://{tmp_path}/my_run"
    build_run(root, iterations=2)
    for facts in (gather(root, state), hostile_facts()):
        page = build_page(facts, failed_task="a_b", error_message="<b>a_b</b>")
        assert faults(render_markdown(page)) == []


def test_the_pages_of_a_reshard_are_clean(file_root, tmp_path):
    bench = Bench(file_root, tmp_path)
    bench.reshard("tp=2")
    assert faults(bench.read("summary.md")) == []
    for step in (1, 2):
        write_checkpoint(f"{file_root}/a_b/{step}", tiny_model(layers=1), step=step)
    for folder in (f"{file_root}/a_b", ""):
        outcome = apply_retention(folder, 1, 0)
        assert faults(outcome.page) == []
