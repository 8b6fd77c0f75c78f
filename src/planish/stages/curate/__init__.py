"""Curate stage: sources of prompts, filters, split, and a report that accounts for every row."""
