"""Formats of the stored objects: tensor files, small values, metadata, checksums."""
