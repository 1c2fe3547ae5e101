"""Data-parallel training of PyTorch models over Horovod that is right, and proves it."""

__version__ = "0.1.0"
