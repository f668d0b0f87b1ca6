"""The admin and the site in a real browser: Debian's Chromium, headless.

A package, so that its fixtures of that scope end with it: one site and one browser per backend.
"""
