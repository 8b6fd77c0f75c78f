"""The evaluate stage: accuracy of policies on held-out prompts."""
