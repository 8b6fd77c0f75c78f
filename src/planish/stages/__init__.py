"""The stages of a pipeline, one folder each.

Only two import others: `iterate` runs the work of several stages in one task, and `report` starts
a failed run again by `next_run`. `tests/contract/test_import_directions.py` holds this.
"""
