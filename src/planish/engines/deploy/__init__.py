"""Ranks on other machines: their start, their discovery and their control."""
