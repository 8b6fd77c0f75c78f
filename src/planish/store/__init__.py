"""Bytes by URI, on a file system or in an S3 bucket."""

from planish.store.base import Store, file_path, file_uri, normal_uri, open_store, parse_uri

__all__ = ["Store", "file_path", "file_uri", "normal_uri", "open_store", "parse_uri"]
