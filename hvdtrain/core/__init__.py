"""Values and arithmetic: no files but recipes, no clock, no framework."""
