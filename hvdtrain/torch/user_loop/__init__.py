"""A training loop of the user's: what a recipe's run promises, for a program that keeps its loop."""
