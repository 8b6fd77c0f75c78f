"""Saves: from the tensors of every rank to the bytes in the store."""
