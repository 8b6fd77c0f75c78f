"""Attention ranks and expert ranks apart: the disaggregated engine of MegaScale-Infer."""
