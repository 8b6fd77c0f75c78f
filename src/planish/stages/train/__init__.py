"""The train stage: one rollout batch becomes several optimizer steps and a new train state."""
