"""The model and its inputs: prompts, families, operators, sites, edges, the checkpoint."""
