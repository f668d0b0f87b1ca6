"""Optional parts of the package: apps of Django, and adapters for other packages.

The modules outside of this package do not import them.
"""
