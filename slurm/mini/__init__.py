"""A real SLURM of several nodes on one Linux machine: each node a set of namespaces."""


class ClusterError(Exception):
    """Its text is one line: the value, the rule, the remedy."""
