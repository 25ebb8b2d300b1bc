"""The version, for whoever may not import the package's public names."""

__version__ = "0.2.0"
