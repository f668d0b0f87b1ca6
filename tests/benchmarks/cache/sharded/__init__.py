"""The application of a project with our library."""
