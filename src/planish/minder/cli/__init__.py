"""The commands of `planish minder`."""
