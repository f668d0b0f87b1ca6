"""The admin and the site in a real browser: Debian's Chromium, headless.

A package, because fixtures of package scope end with it: one site and one browser per backend.
"""
