"""Adapters: how the state of each training framework becomes boxes of whole tensors, and back."""
