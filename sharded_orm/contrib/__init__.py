"""Adapters for packages that only some sites have. Nothing else in this library imports them."""
