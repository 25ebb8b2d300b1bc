"""An all-gather by one kernel: each rank stores its share into memory of the others.

Call `gather`; `kernels` has the protocol, and `memory` the memory that ranks share.
"""
