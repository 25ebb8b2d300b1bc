"""Operators whose weights are divided among tensor-parallel ranks, with the bits of one rank.

No sum crosses ranks: ranks copy inputs and outputs to each other, and each computes whole sums for
its share of the outputs. So the bits are those of one rank, over any transport, for any number of
ranks. `copies` has the collectives, and each other file one operator.
"""
