"""Rollout stage: sample groups of responses until the batch of an iteration is full."""
