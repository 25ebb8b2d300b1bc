"""Two holders of one model's weights -> what became of each parameter."""
