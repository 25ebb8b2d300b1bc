"""The version, for modules that may not import the package's public names."""

__version__ = "0.2.0"
