"""The command line: one file per command. No torch is imported before a command runs."""
