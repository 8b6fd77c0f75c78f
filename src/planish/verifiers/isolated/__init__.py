"""Runs the code of a response and the tests of its row in two confined processes.

The tests get only plain data from the code. The code can change or kill only its own process.
"""
