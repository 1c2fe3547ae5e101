"""The messages between ranks, each a frozen value.

When a message is read, its types and bounds are checked, and whether its sender may send it. Texts are shown at a
person's terminal, so that control characters become escapes.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from hvdtrain.launch.rendezvous import Endpoint, Port
from hvdtrain.ranks.stacks import Place, Process, State
from hvdtrain.terminal import STOP_SIGNALS
from hvdtrain.untrusted import printable

LONGEST_TEXT = 1000
MOST_ADDRESSES = 8
MOST_COUNTERS = 64
NONCE_DIGITS, PROOF_DIGITS = 32, 64


def cut(text: str) -> str:
    """The text, cut to the length that a message may have."""
    return printable(text, LONGEST_TEXT)[:LONGEST_TEXT]


def _requests_stop(number: int) -> int:
    if number not in STOP_SIGNALS:
        raise ValueError("no signal that requests a stop")
    return number


Text = Annotated[str, StringConstraints(max_length=LONGEST_TEXT), AfterValidator(cut)]
Name = Annotated[str, StringConstraints(max_length=255, pattern=r"^[\w.:-]+$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Bytes = Annotated[float, Field(gt=0, lt=2**53, allow_inf_nan=False)]
CounterKey = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,20}:[\w-]{1,100}$")]
Joules = Annotated[float, Field(ge=0, lt=2**53, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, lt=2**63, allow_inf_nan=False)]
MOST_FIGURES = 20
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
ExitCode = Annotated[int, Field(ge=1, le=255)]
Signal = Annotated[int, AfterValidator(_requests_stop)]


class Message(BaseModel):
    """One line of JSON between two ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Hello(Message):
    """A rank's first message to what may be rank 0."""

    kind: Literal["hello"] = "hello"
    nonce: Annotated[str, StringConstraints(pattern=f"^[0-9a-f]{{{NONCE_DIGITS}}}$")]


class Challenge(Hello):
    """Rank 0's answer, which proves that it has the key. `credential` holds the key, encrypted by munge."""

    kind: Literal["challenge"] = "challenge"  # type: ignore[assignment]
    proof: Annotated[str, StringConstraints(pattern=f"^[0-9a-f]{{{PROOF_DIGITS}}}$")]
    credential: Annotated[str, StringConstraints(max_length=2000)] | None


class Identity(Message):
    """Which rank the sender is. This message and all that follow are signed."""

    kind: Literal["identity"] = "identity"
    rank: Count
    endpoint: Endpoint
    process: Process | None = None


class Welcome(Message):
    """Rank 0 has admitted the rank."""

    kind: Literal["welcome"] = "welcome"
    endpoint: Endpoint
    process: Process | None = None


class Ready(Message):
    """The sender may start its collective library."""

    kind: Literal["ready"] = "ready"


class AllReady(Message):
    """All ranks are ready; with what they need to start the collective library. `endpoints` are all ranks', or rank 0's
    alone."""

    kind: Literal["all_ready"] = "all_ready"
    horovod_port: Port | None
    interface: Name | None
    endpoints: Annotated[list[Endpoint], Field(min_length=1)]


class Busy(Message):
    """Why the sender lets the others wait. An empty text means that it no longer does."""

    kind: Literal["busy"] = "busy"
    text: Text


class Heartbeat(Message):
    """The sender is alive."""

    kind: Literal["heartbeat"] = "heartbeat"


class Traffic(BaseModel):
    """What each step sends from one address to another: the bytes, and for how many seconds they are under way."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    own: Name
    other: Name
    size: Bytes
    busy: Seconds


class Times(Message):
    """The median seconds of the sender's last steps, None where they are not known, and its connections with the most
    traffic.

    `reading`: it waits for its batch. `rest`: it does everything else. `waiting`: the part of `rest` in which it waits
    for other ranks.
    """

    kind: Literal["times"] = "times"
    reading: Seconds | None
    rest: Seconds
    waiting: Seconds | None
    traffic: Annotated[tuple[Traffic, ...], Field(max_length=MOST_ADDRESSES)] = ()
    figures: Annotated[dict[Name, Number], Field(max_length=MOST_FIGURES)] = {}
    """See `hvdtrain.ranks.slow.FIGURES`."""


class Energy(Message):
    """The joules that each of the sender's counters has counted since its process began."""

    kind: Literal["energy"] = "energy"
    joules: Annotated[dict[CounterKey, Joules], Field(max_length=MOST_COUNTERS)]


class StackRequest(Message):
    """Asks where the receiver's training thread is, as no step has ended for a while."""

    kind: Literal["stack_request"] = "stack_request"


class Stack(Message):
    """Where the sender's training thread is, whether it may stay there for long, in which collective it
    waits, and after how many steps."""

    kind: Literal["stack"] = "stack"
    place: Place
    long: bool
    where: Text
    operation: Text = ""
    users_line: Text = ""
    steps: Count = 0


class ProcessRequest(Message):
    """Asks the receiver what the process of another rank of its host does, which does not answer."""

    kind: Literal["process_request"] = "process_request"
    rank: Count
    process: Process


class ProcessState(Message):
    """What the process of another rank does, in reply to a ProcessRequest."""

    kind: Literal["process_state"] = "process_state"
    rank: Count
    state: State
    where: Text


class StopRequest(Message):
    """A signal has requested the sender to stop, or the end of its launcher."""

    kind: Literal["stop_request"] = "stop_request"
    signal: Signal
    launcher: bool = False


class StopPrepare(Message):
    """Asks the receiver how many steps it has made. After the next step it waits for StopAt."""

    kind: Literal["stop_prepare"] = "stop_prepare"


class StopPrepared(Message):
    """How many steps the sender has made, in reply to StopPrepare."""

    kind: Literal["stop_prepared"] = "stop_prepared"
    steps: Count


class StopAt(Message):
    """Rank 0 has chosen after how many steps of each process all ranks stop."""

    kind: Literal["stop_at"] = "stop_at"
    step: Count
    signal: Signal


class Exited(Message):
    """The sender's program has exited in the middle of the training, after so many of its steps. The sender waits until
    all ranks have, or one ends by an error."""

    kind: Literal["exited"] = "exited"
    steps: Count
    code: Annotated[int, Field(ge=0, le=255)]


class Left(Message):
    """The sender has finished."""

    kind: Literal["left"] = "left"


class Failed(Message):
    """The sender ends with an error."""

    kind: Literal["failed"] = "failed"
    text: Text
    code: ExitCode


class Lost(Message):
    """A rank failed or was lost."""

    kind: Literal["lost"] = "lost"
    text: Text
    code: ExitCode


_FromAny = Busy | Heartbeat | Exited | Left | Failed
_FromRank = _FromAny | Ready | Times | Energy | Stack | ProcessState | StopRequest | StopPrepared
_FromRank0 = _FromAny | AllReady | StackRequest | ProcessRequest | StopPrepare | StopAt | Lost
HELLO, CHALLENGE = TypeAdapter(Hello), TypeAdapter(Challenge)
IDENTITY, WELCOME = TypeAdapter(Identity), TypeAdapter(Welcome)
FROM_RANK: TypeAdapter[_FromRank] = TypeAdapter(Annotated[_FromRank, Field(discriminator="kind")])
FROM_RANK_0: TypeAdapter[_FromRank0] = TypeAdapter(Annotated[_FromRank0, Field(discriminator="kind")])
DIAGNOSTIC = (Times, Energy, Stack, StackRequest, ProcessState, ProcessRequest)
"""Messages that training does not need: an error in handling them ends nothing."""
