"""The operators' actions as functions.

The management commands and the admin parse input, call these functions and show the results.
"""
