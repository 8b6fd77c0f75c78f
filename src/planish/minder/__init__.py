"""Find the faulty machine of a synchronous training job by its unlikeness to its peers.

Source: Minder, arXiv 2411.01791.
"""
