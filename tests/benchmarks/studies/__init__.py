"""Experiments of many small runs, each against one published statement.

    python -m tests.benchmarks.studies --study clip-higher --seeds 0 1 2

| module | what is there |
| --- | --- |
| `arms` | tasks (TOML files of this folder) and arms: which settings a run has |
| `runner` | one process is one run: the stages called one after the other, one JSON at the end |
| `schedule` | a few such processes at a time, with a progress bar; finished runs are kept |
| `reading` | finished runs, means with intervals, the rule by which a direction is seen |
| `writing` | `write_study`: the JSON of a study beside its published statement, and its picture |
| `group_relative`, `actor_critic`, `truncation`, `utilisation`, `value_*` | the studies |
| `slot_model` | how full slots are with windows of so many tokens: also a command |

A study is a module-level `STUDY` or `STUDIES` of `writing.Study`; `__main__.MODULES` lists the
modules. A study that needs no run names no arms and measures inside its `read` function.

Runs live under `runs/studies/<task>/<arm>/seed<k>.json` and are shared: an arm that two studies
name is run once. All arms of a seed start from the same bytes of the same policy.
"""
