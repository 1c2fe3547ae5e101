"""What ranks send to one another: a frozen value each, checked when it is read for its type, its bounds, and whether
its sender may send it. A text is for a person's terminal: control characters become escapes."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from hvdtrain.meeting import Port, Seat
from hvdtrain.signals import ASKING_TO_STOP
from hvdtrain.untrusted import printable

LONGEST_TEXT = 1000
NONCE_DIGITS, PROOF_DIGITS = 32, 64


def cut(text: str) -> str:
    """The text as a message can hold it."""
    return printable(text, LONGEST_TEXT)[:LONGEST_TEXT]


def _asks_to_stop(number: int) -> int:
    if number not in ASKING_TO_STOP:
        raise ValueError("no signal that asks to stop")
    return number


Text = Annotated[str, StringConstraints(max_length=LONGEST_TEXT), AfterValidator(cut)]
Name = Annotated[str, StringConstraints(max_length=255, pattern=r"^[\w.:-]+$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
ExitCode = Annotated[int, Field(ge=1, le=255)]
Signal = Annotated[int, AfterValidator(_asks_to_stop)]


class Message(BaseModel):
    """One line between two ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Hello(Message):
    """The first word, of a rank to who may be rank 0."""

    kind: Literal["hello"] = "hello"
    nonce: Annotated[str, StringConstraints(pattern=f"^[0-9a-f]{{{NONCE_DIGITS}}}$")]


class Challenge(Hello):
    """Rank 0's answer, which proves that it has the key. `credential` holds the key itself, for munge to read."""

    kind: Literal["challenge"] = "challenge"  # type: ignore[assignment]
    proof: Annotated[str, StringConstraints(pattern=f"^[0-9a-f]{{{PROOF_DIGITS}}}$")]
    credential: Annotated[str, StringConstraints(max_length=2000)] | None


class Here(Message):
    """A rank says which it is. From here on every line is signed."""

    kind: Literal["here"] = "here"
    rank: Count
    seat: Seat


class Welcome(Message):
    """Rank 0 knows the rank now."""

    kind: Literal["welcome"] = "welcome"
    seat: Seat


class Ready(Message):
    """A rank may start its collective library."""

    kind: Literal["ready"] = "ready"


class Go(Message):
    """All are ready: what they need to start it."""

    kind: Literal["go"] = "go"
    rendezvous: Port | None
    interface: Name | None
    seats: list[Seat]


class Doing(Message):
    """Why the sender lets the others wait."""

    kind: Literal["doing"] = "doing"
    text: Text


class Beat(Message):
    """A sign of life."""

    kind: Literal["beat"] = "beat"


class Wish(Message):
    """A signal has asked a rank to stop."""

    kind: Literal["wish"] = "wish"
    signal: Signal


class Stop(Message):
    """All stop after that step."""

    kind: Literal["stop"] = "stop"
    step: Count
    signal: Signal


class Stopping(Message):
    """A rank has read the Stop."""

    kind: Literal["stopping"] = "stopping"


class Left(Message):
    """The sender has finished."""

    kind: Literal["left"] = "left"


class Failed(Message):
    """The sender ends with an error."""

    kind: Literal["failed"] = "failed"
    text: Text
    code: ExitCode


class Lost(Message):
    """Rank 0 knows of a rank that failed or was lost."""

    kind: Literal["lost"] = "lost"
    text: Text
    code: ExitCode


_FromRank = Ready | Doing | Beat | Wish | Stopping | Left | Failed
_FromChief = Go | Doing | Beat | Stop | Left | Failed | Lost
HELLO, CHALLENGE = TypeAdapter(Hello), TypeAdapter(Challenge)
HERE, WELCOME = TypeAdapter(Here), TypeAdapter(Welcome)
FROM_RANK: TypeAdapter[_FromRank] = TypeAdapter(Annotated[_FromRank, Field(discriminator="kind")])
FROM_CHIEF: TypeAdapter[_FromChief] = TypeAdapter(Annotated[_FromChief, Field(discriminator="kind")])
