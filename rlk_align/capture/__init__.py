"""One engine run -> one trace: starts, follows and ends the engine's process."""
