"""The PyTorch adapter: `python -m hvdtrain.torch RECIPE [flags]`."""
