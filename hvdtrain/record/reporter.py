"""The reports of a run: a log for people, metrics.jsonl for programs, TensorBoard events, and how far training is."""

# The words of a log line are those of Horovod's tutorial, whose readers filter them by `grep "Avg img/sec"`.

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from hvdtrain import files, untrusted
from hvdtrain.core.metrics import TextUnits, Totals
from hvdtrain.core.progress import Progress, RunLength
from hvdtrain.core.wording import duration
from hvdtrain.errors import OTHER_FOLDER, OutputError, StoppedError
from hvdtrain.record import reader
from hvdtrain.record.progress_line import Ahead, Estimate
from hvdtrain.record.trackers import Trackers
from hvdtrain.terminal import LOG, Activity, Screen, spinner

BAR, SHORTEST_BAR = 30, 4
"""The most and the fewest columns of the progress bar, which gets the room that the numbers leave."""


class Training(Estimate, Activity):
    """What the terminal shows: the numbers of the newest log line, and how far training is."""

    epoch = 0
    is_ending = False
    """Whether the epoch was reported already, and its checkpoint is being written."""
    _numbers: tuple[str, ...] = ()

    def logged(self, step: int, loss: float, lr: float, rate: str) -> None:
        """Takes the numbers of a new log line, that of so many steps."""
        self._numbers = f"step {step}: loss {loss:.4f}", rate, f"LR {lr:.4g}"

    def bar(self, width: int) -> str:
        """One line with a character that moves by the clock and a progress bar. The LR and what is before it are left
        out where they have no room."""
        step, total = self.step, self._total
        where = f"{step}/{total} {step / total:4.0%}" if total else f"step {step}"
        ends = [f"{spinner()} {where}", *self.left("{} left"), *self._running()]
        parts = [*ends, f"epoch {self.epoch}", *self._numbers]
        least = SHORTEST_BAR + 2 if total else 0
        while len(parts) > len(ends) and len("  ".join(parts)) + least > width:
            parts.pop()
        room = width - len("  ".join(parts)) - 2
        if total and room >= SHORTEST_BAR:
            full, empty = "━─" if "utf" in (getattr(sys.__stdout__, "encoding", None) or "").lower() else "#-"
            done = int(step / total * min(room, BAR))
            parts.insert(len(ends), full * done + empty * (min(room, BAR) - done))
        return "  ".join(parts)

    def line(self) -> str:
        """A line of the log without the numbers of earlier steps."""
        where = self.where(self.step, self.epoch)
        return ", ".join([where, *self.left("Time left: {}"), *self._running()])

    def where(self, step: int, epoch: int) -> str:
        """How a line of the log begins."""
        total = self._total
        return f"Epoch: {epoch}, Step: {step}/{total}" if total else f"Epoch: {epoch}, Step: {step}"

    def log_line(
        self, begin: str, values: Mapping[str, float], ends: Sequence[str], columns: int | None, *, is_program: bool
    ) -> str:
        """A line of the log, which ends with LR and rate, `ends`; where a terminal is too narrow for it, without the
        LR, then the time left, the norm and the epoch."""
        more, line = [ends[0], *self.left("Time left: {}")], ""
        few = {name: value for name, value in values.items() if name != "gradient_norm"}
        ways = [(begin, values, more), (begin, values, more[1:]), (begin, values, []), (begin, few, [])]
        for at, shown, some in (*ways, (begin.partition(", ")[2], few, [])):
            text = _listed(shown) if is_program else f"Loss: {shown['loss']:.4f}"
            line = ", ".join([at, text, *some, ends[1]])
            if columns is None or len(LOG + line) <= columns:
                break
        return line

    @property
    def _total(self) -> int | None:
        ahead = self.ahead  # another thread may set it anew
        return ahead.total if ahead else None

    def left(self, text: str) -> list[str]:
        """The time left within that text, if it is known."""
        left = self.seconds_left()
        return [] if left is None else [text.format(duration(left, rough=True))]

    def _running(self) -> list[str]:
        """What takes unusually long, and for how long it has lasted."""
        if not self.is_slow:
            return []
        pause, step = ("checkpoint", "validation"), ("this step", "first step (may compile)")
        what = pause[not self.is_ending] if self.is_in_pause else step[not self.made]
        return [f"{what} {duration(self.running, rough=True)}"]


class Events:
    """Writes scalars into a new file in `folder`. TensorBoard then ignores values of older files from `first_step` on.
    Every method raises an error where the disk is full: no thread writes, whose error would be lost."""

    def __init__(self, folder: Path, first_step: int, framework: str) -> None:
        # Here, on rank 0 alone, as the import takes a second; and not one for both: tensorboardX imports PyTorch.
        if framework == "tensorflow":
            from tensorflow.compat.v1 import Event, SessionLog, Summary
            from tensorflow.io import TFRecordWriter as Writer
        else:
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.proto.summary_pb2 import Summary
            from tensorboardX.record_writer import RecordWriter as Writer

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._records = Writer(str(folder / name))
        self.flush, self.close = self._records.flush, self._records.close
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Adds one point of a curve, which a reader sees after `flush`."""
        self._write(step=step, summary=self._summary(value=[self._summary.Value(tag=tag, simple_value=value)]))

    def _write(self, **what: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **what).SerializeToString())


class Reporter:
    """Rank 0's reports: a progress bar on a terminal, lines elsewhere, metrics.jsonl and the trackers."""

    of_groups: Callable[[], str] = staticmethod(lambda: "")  # what the log adds to LR where groups have others

    def __init__(
        self,
        folder: Path,
        events: Events | None,
        first_step: int,
        screen: Screen | None = None,
        *,
        valid_examples: int = 0,
        trackers: Trackers | None = None,
        is_program: bool = False,
        text: TextUnits | None = None,
    ) -> None:
        """Appends to the run's files from `first_step` on. `screen` prints the lines, and shows how far training is.
        The log of a user's own program, `is_program`, has all metrics of a step, by name. `text`: of a training on
        text, which is reported in tokens."""
        self._is_program, self._text = is_program, text
        self._jsonl = _reopen(folder / "metrics.jsonl", first_step)
        self._events = events
        self._trackers = trackers or Trackers()
        self._screen, self._valid_examples = screen or Screen(), valid_examples
        self._training = Training()
        self._epoch_began = time.monotonic()

    def note(self, text: str) -> None:
        """Prints one line of the log."""
        self._screen.print(f"{LOG}{text}")

    def begin_epoch(self, progress: Progress, length: RunLength) -> None:
        """Begins an epoch, or what is left of it."""
        self._epoch_began = time.monotonic()
        self._training.begin_epoch(progress.step)
        self._expect(progress, length)
        self._training.epoch, self._training.is_ending = progress.epoch + 1, False
        self._screen.show(self._training)

    def stepped(self, progress: Progress, length: RunLength) -> None:
        """Notes that an update was made."""
        self._training.stepped(progress.step)
        if not self._training.ahead:
            self._expect(progress, length)

    def steps(
        self,
        step: int,
        epoch: int,
        totals: Totals,
        lr: float,
        seconds: float,
        gradient_norm: float | None = None,
        noise: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Reports the steps since the last call: totals over all ranks, and the seconds that they took. `epoch` counts
        from 1; `noise`: of the gradients."""
        rate, values = totals.count / seconds, {"loss": totals.mean_loss, **noise}
        if self._is_program:
            values |= totals.means
        of_text = self._text.of_steps(totals, seconds) if self._text else {}
        for name, value in values.items():
            self._scalar(f"{name}/step", value, step)
        if gradient_norm is not None:
            values["gradient_norm"] = gradient_norm
            self._scalar("gradient_norm/step" if self._is_program else "gradient_norm", gradient_norm, step)
        self._scalar("learning_rate", lr, step)
        self._write("step", step, epoch, lr=lr, examples_per_second=rate, **of_text, **values)
        rate = of_text.get("tokens_per_second", rate)
        self._training.logged(step, totals.mean_loss, lr, f"{rate:.1f} {'tokens' if self._text else 'img'}/s")
        if self._screen.display != "bar":
            unit = "examples" if self._is_program else "tokens" if self._text else "img"
            begin, label = self._training.where(step, epoch), f"LR{self.of_groups()}"
            ends = f"{label}: {lr:.4g}", f"Avg {unit}/sec: {rate:.1f}"
            columns, is_program = self._screen.columns, self._is_program
            self.note(self._training.log_line(begin, values, ends, columns, is_program=is_program))

    def epoch(self, step: int, epoch: int, train: Totals, valid: Totals) -> None:
        """Reports the end of an epoch, with totals over all ranks."""
        seconds = time.monotonic() - self._epoch_began
        metrics = {}
        self._training.is_ending = True
        self.note(f"Time taken for epoch {epoch} is {seconds:.1f} sec")
        means = {split: {"loss": of.mean_loss, **of.means} for split, of in (("train", train), ("valid", valid))}
        for name in {**means["train"], **means["valid"]}:
            digits = 5 if name == "loss" else 4
            splits = [split for split in means if name in means[split]]
            for split in splits:
                metrics[f"{split}_{name}"] = means[split][name]
                self._scalar(f"{name}/{split}", means[split][name], step)
            self.note(", ".join(f"{split} {name}={means[split][name]:.{digits}f}" for split in splits))
        if self._text:
            of_loss = self._text.of_loss(valid.mean_loss)
            self.note(", ".join(f"{name.replace('_', ' ')}={value:.4f}" for name, value in of_loss.items()))
            counts = {"train_tokens": self._text.counted(train), "valid_tokens": self._text.counted(valid)}
            metrics |= {**of_loss, **{name: round(count) for name, count in counts.items()}}
        metrics |= {"train_examples": round(train.count), "valid_examples": round(valid.count)}
        self._write("epoch", step, epoch, seconds=seconds, **metrics)

    def values(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Reports the end of an epoch of a user's own program, with the values that it has given."""
        seconds = time.monotonic() - self._epoch_began
        for name, value in values.items():
            self._scalar(name, value, step)
        self.note(f"Epoch: {epoch}{', ' * bool(values)}{_listed(values)} ({seconds:.1f} sec)")
        self._write("epoch", step, epoch, seconds=seconds, **values)

    def close(self, state: str = "finished") -> None:
        """Closes the files, and ends the trackers' runs in that state: finished, failed or stopped."""
        self._draw(lambda events: events.close())
        for line in self._trackers.close(state):
            self.note(line)
        self._screen.waiting("after the training" if self._is_program else "ending")
        with contextlib.suppress(OSError):  # a full disk has stopped the run already
            self._jsonl.close()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stopped = kind is not None and issubclass(kind, StoppedError | KeyboardInterrupt)
        self.close("finished" if kind is None else "stopped" if stopped else "failed")

    def _write(self, kind: str, step: int, epoch: int, **metrics: float) -> None:
        # JSON has no NaN, which a diverged validation is.
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"kind": kind, "step": step, "epoch": epoch, **numbers, "time": round(time.time(), 3)}
        self._jsonl.write(json.dumps(record) + "\n")
        self._jsonl.flush()
        for line in self._trackers.add({"epoch": epoch, **metrics}, step):
            self.note(line)
        if kind == "epoch":
            self._draw(lambda events: events.flush())

    def _expect(self, progress: Progress, length: RunLength) -> None:
        if length.global_batch:  # a loop of the user's may name it only with the epoch's batches
            self._training.expect(Ahead.from_progress(progress, length), self._valid_examples / length.global_batch)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self._draw(lambda events: events.add_scalar(tag, value, step))

    def _draw(self, call: Callable[[Events], object]) -> None:
        """Calls TensorBoard's writer. Once it has failed it is not called again: no tracker stops a training."""
        if self._events:
            try:
                call(self._events)
            except Exception as error:
                self._events = None
                self.note(untrusted.one_line(f"tracker tensorboard ends: {type(error).__name__}: {error}"))


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {value:.5g}" for name, value in values.items())


def _reopen(path: Path, first_step: int) -> IO[str]:
    """The file to append to, without the records of steps that a resumed run makes again."""
    try:
        if path.exists():
            if path.stat().st_size > reader.MOST_BYTES:  # of holes, perhaps
                raise ValueError("it has more than 1 GiB")
            with files.opened(path, follow=False) as old, files.replacing(path) as new:
                for lines in reader.lines(old, 0, reader.MOST_BYTES):
                    new.writelines(f"{line.decode()}\n" for line in lines if _is_made(line, first_step))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot append to {path}: {reason}", remedy=OTHER_FOLDER) from None


def _is_made(line: bytes, first_step: int) -> bool:
    """Whether the line is a whole record of a step that is not made again."""
    step = (reader.parsed(line) or {}).get("step")
    return type(step) is int and 0 <= step <= first_step
