"""How many seconds ranks wait for one another."""

import math

MANY = 400  # ranks; where there are more, each sends less often than the constants below say
GATHER, LONGEST_GATHER = 5e-5, 0.2  # for each rank, and at most, in which messages are collected and read together

CONNECT = 3.5  # for a connection to be made: Linux tries again after 1 and 3
RETRY = 0.2  # until the same address is tried again
HANDSHAKE = 5.0  # for either end of a connection to prove what it is
ARRIVAL = 300.0  # for all ranks to come: a busy file system starts them minutes apart
TICK = 0.5  # between two looks at the clock
HEARTBEAT = 2.0  # between two messages that only show that a rank lives
UNREACHABLE = 20.0  # without an answer from a host's kernel after which its ranks are given up
SILENCE = 60.0  # without a message of a rank, in steps: C code that holds Python's lock silences its thread too
TIMES = 1.0  # between two reports of how long a rank's steps take
ENERGY = 10.0  # between two readings of energy counters
STALLED = 5.0  # without the end of a step after which ranks are asked where they are
STACKS = 2.0  # between two such requests
STUCK = 12.0  # that others wait for a rank before it is named: with the above within 30 seconds
LONG = 300.0  # the same while it validates, or writes a checkpoint
REPEAT = 300.0  # between two warnings of the same rank
GRACE = 8.0  # for the training thread to end by itself once a rank is lost
CHECKPOINT = 20.0  # that a SIGTERM leaves for a last checkpoint: SLURM kills 30 after it
RANK_0_REPORT = 5.0  # for rank 0 to report an error before another rank that raised it too ends
FAREWELL = 10.0  # that a rank that refused waits for the others to come, and learn of it
LAST_STATUS = 2.0  # for the status of a run that ends by force: its file system may hang


def of_each(seconds: float, size: int, most: float = math.inf) -> float:
    """Seconds between two messages of each of `size` ranks to rank 0: longer for more than MANY ranks, at
    most `most`."""
    return max(seconds, min(seconds * size / MANY, most))
