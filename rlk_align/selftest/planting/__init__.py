"""Planted faults: what the tool must find, put into the live model of an engine."""
