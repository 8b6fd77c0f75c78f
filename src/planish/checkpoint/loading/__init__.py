"""Loads: from the bytes in the store to the tensors of every rank."""
