"""Stages that write a checkpoint anew for another layout, check the copy and keep the newest."""
