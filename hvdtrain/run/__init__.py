"""A run: one loop, and all that it promises around it."""
