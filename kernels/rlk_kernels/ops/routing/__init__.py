"""top-k routing: which experts a token is sent to, and with what weights."""
