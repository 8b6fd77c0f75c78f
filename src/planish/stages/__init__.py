"""The stages of a pipeline, one folder each.

Only `iterate`, which runs several of them in one task, and `report`, by `next_run`, import others.
"""
