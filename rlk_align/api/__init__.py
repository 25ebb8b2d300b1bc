"""The tool for Python: the public functions, and what they and the command line share."""
