"""position_scale: a factor of queries that grows with their position."""
