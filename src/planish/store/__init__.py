"""Bytes by URI: local file systems and S3."""
