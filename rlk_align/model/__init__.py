"""What is compared: prompts, families, sites, edges, the checkpoint."""
