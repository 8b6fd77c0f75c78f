"""The reshard stage: a checkpoint written anew for other ranks, or merged for engines."""
