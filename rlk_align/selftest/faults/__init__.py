"""The faults by name, as known without torch."""
