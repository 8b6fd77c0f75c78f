"""Gangs: one job of several pods that train together, submitted by the pod of a stage."""
