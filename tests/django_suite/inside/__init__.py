"""Modules that ``runtests.py`` imports, by their own names: their folder is on its path."""
