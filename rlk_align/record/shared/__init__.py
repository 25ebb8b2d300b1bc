"""What both sides choose and write alike: sequences, and the shards of a step."""
