"""The engines that a run may ask for by name."""
