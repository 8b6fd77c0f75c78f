"""What lies in the store: records, tensor files, metadata, checksums."""
