"""Code of a response and the tests of its row, each in a process that confined itself before.

The tests see of the code only plain data: what it prints, patches or kills is its own process.
"""
