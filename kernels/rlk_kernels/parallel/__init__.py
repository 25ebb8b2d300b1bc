"""Operators whose weights are divided among tensor-parallel ranks, with the bits of one rank.

No sum crosses ranks: ranks copy inputs and outputs to each other, and each rank computes whole sums
for some of the outputs. So the bits are those of one rank, over any transport and for any number of
ranks. `copies` has the collectives, and each other file has one operator.
"""
