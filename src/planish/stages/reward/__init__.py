"""Reward stage: score the rollouts of an iteration row by row."""
