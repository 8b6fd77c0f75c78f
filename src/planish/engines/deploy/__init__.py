"""Ranks on other machines: how they are started there, found, and steered from here."""
