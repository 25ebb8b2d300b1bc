"""The Python API: the public functions, and the requests that they share with the command line."""
