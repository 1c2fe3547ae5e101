"""What the command line offers beside training."""
