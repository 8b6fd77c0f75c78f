"""Plans where attention and experts of a model run apart: performance, search, simulation.

Source: MegaScale-Infer, arXiv 2504.02263.
"""
