"""Compares our code with stock Django: ``python -m tests.benchmarks``.

Nothing here is a test: the figures depend on the machine, so they are printed, not asserted.
Both sides run in one process (the request signals: in two), on the same rows of the same
server, and alternate in short turns. The report shows the median of the ratios of the turns.
"""
