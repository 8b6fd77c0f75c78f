"""Planner for separate attention and experts of a model: performance, search, simulation.

Source: MegaScale-Infer, arXiv 2504.02263.
"""
