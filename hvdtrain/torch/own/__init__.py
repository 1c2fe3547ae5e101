"""A loop of one's own: what a recipe's run promises, for a program that keeps its loop."""
