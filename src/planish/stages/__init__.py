"""The stages of a pipeline, one folder each; no stage imports another."""
