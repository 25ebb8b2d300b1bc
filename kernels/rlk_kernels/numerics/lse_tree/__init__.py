"""Softmax statistics of a row in one fixed binary tree."""
