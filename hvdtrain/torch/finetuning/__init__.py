"""Fine-tuning in PyTorch: a network begins with given weights, and parts of it learn apart."""
