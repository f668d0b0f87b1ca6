"""Modules that ``runtests.py`` imports by their own names: this folder is on its path."""
