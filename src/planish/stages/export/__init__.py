"""The checkpoint stage: a train state becomes a policy that rollout engines load."""
