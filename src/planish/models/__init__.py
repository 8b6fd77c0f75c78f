"""Policies: built from scratch; loaded from the store, a folder or a hub; saved."""
