"""TensorBoard's event files, read from the record format itself."""

from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def events(folder: Path) -> Iterator[Event]:
    """Every event of the folder's files, oldest file first."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")  # length, its checksum, the event, its checksum
            yield Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of every scalar."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
