"""Bytes by URI, on a file system or in an S3 bucket."""

from planish.store.base import Store, open_store, parse_uri

__all__ = ["Store", "open_store", "parse_uri"]
