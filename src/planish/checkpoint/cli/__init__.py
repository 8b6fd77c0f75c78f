"""The commands of `planish checkpoint`."""
