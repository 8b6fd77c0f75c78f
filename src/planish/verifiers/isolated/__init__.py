"""Code of a response and the tests of its row, in two processes that confined themselves.

The tests get only plain data from the code; the code can patch or kill only its own process.
"""
