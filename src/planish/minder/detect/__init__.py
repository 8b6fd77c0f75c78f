"""The detector: metrics of a job's machines go in, the machine that is unlike its peers comes
out.
"""
