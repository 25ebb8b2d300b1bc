"""An all-gather in one kernel: each rank stores its shard into the memory of the other ranks.

`gather` has the interface, `kernels` the protocol, and `memory` the memory that ranks share.
"""
