"""An all-gather by one kernel: each rank stores its share into memory of the others.

`gather` is what is called, `kernels` has the protocol, and `memory` what ranks share.
"""
