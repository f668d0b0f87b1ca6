"""The application of a project with stock Django only."""
