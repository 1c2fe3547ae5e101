"""What is written of a run, and how it is read back; knows no socket."""
