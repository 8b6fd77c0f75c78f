"""The stages of a pipeline, one folder each.

Only two stages import others: `iterate` runs several of them in one task, and `report` calls
`next_run`.
"""
