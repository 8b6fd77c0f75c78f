"""Frames of hidden states between attention ranks and expert ranks (M2N), and their transports."""
