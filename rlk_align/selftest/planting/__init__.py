"""Planting: puts a fault, which the tool must find, into the live model of an engine."""
