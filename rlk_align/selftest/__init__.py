"""Planted faults on real engines: what is found of them, and what is found where there is none."""
