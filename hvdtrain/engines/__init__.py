"""The engines that a run can name."""
