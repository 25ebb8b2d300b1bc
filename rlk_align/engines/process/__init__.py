"""An engine's processes: jobs, ranks, heartbeats, interpreters, manifests."""
