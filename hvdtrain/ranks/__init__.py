"""The other ranks: how they join, live, agree, stop and leave. Knows no run folder and no terminal."""
