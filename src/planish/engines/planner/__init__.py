"""Planner for models whose attention and experts run on different GPUs: performance, search,
simulation.

Source: MegaScale-Infer, arXiv 2504.02263.
"""
