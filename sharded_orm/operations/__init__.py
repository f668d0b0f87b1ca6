"""The actions of an operator (a person who runs the shards' servers) as functions.

The management commands and the admin parse input, call these functions and show the results.
"""
