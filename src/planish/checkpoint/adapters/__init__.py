"""Adapters from the state of each training framework to boxes of whole tensors, and back."""
