"""One engine run -> one trace: a process of its own, started, followed and ended."""
