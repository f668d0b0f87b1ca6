"""An application of a project that has stock Django only."""
