"""The command `planish show`: prints the content of a store URI as tables."""
