"""What data shows about a model: text, families, statistics, and the walk that gathers them."""
