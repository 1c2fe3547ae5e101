"""The reports of a run: a log for people, metrics.jsonl for programs, TensorBoard events for curves."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from hvdtrain import files, untrusted
from hvdtrain.core.totals import Totals
from hvdtrain.errors import OutputError, StoppedError
from hvdtrain.run.trackers import Trackers

LINE_LIMIT = 1 << 16


class Events(Protocol):
    """Writes TensorBoard's events; each framework brings its own."""

    def add_scalar(self, tag: str, value: float, step: int) -> object:
        """One point of a curve."""

    def flush(self) -> object:
        """Makes what was added visible to a reader."""

    def close(self) -> object:
        """Ends the file."""


class Reporter:
    """Rank 0's log. On a terminal a progress bar, elsewhere lines; always metrics.jsonl, and the trackers."""

    def __init__(
        self,
        folder: Path,
        events: Events | None,
        first_step: int,
        *,
        bar_steps: int | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Appends to the run's files from `first_step` on; `bar_steps` shows a progress bar over so many."""
        self._jsonl = _reopen(folder / "metrics.jsonl", first_step)
        self._events = events
        self._trackers = trackers or Trackers()
        self._bar = _Bar(bar_steps, first_step) if bar_steps is not None else None
        self._epoch_began = time.monotonic()

    def note(self, text: str) -> None:
        """One line of the log."""
        if self._bar:
            self._bar.print(f"INFO - {text}")
        else:
            print(f"INFO - {text}", flush=True)

    def begin_epoch(self) -> None:
        self._epoch_began = time.monotonic()

    def steps(
        self,
        step: int,
        epoch: int,
        iteration: int,
        totals: Totals,
        lr: float,
        seconds: float,
        gradient_norm: float | None = None,
    ) -> None:
        """The steps since the last call: totals over all ranks and the seconds they took.

        `epoch` and `iteration` count from 1 in the log, as the tutorial's do.
        """
        rate = totals.count / seconds
        norm = {} if gradient_norm is None else {"gradient_norm": gradient_norm}
        self._write("step", step, epoch, loss=totals.mean_loss, lr=lr, examples_per_second=rate, **norm)
        self._scalar("loss/step", totals.mean_loss, step)
        self._scalar("learning_rate", lr, step)
        if self._bar:
            self._bar.advance(step, f"epoch {epoch}  loss {totals.mean_loss:.4f}  lr {lr:.4g}  {rate:.1f} img/s")
        else:
            self.note(f"Epoch: {epoch}, Iteration: {iteration}, Avg img/sec: {rate:.1f}")

    def epoch(self, step: int, epoch: int, train: Totals, valid: Totals) -> None:
        """The end of an epoch: totals over all ranks."""
        seconds = time.monotonic() - self._epoch_began
        metrics = {"train_loss": train.mean_loss, "valid_loss": valid.mean_loss}
        self._scalar("loss/train", train.mean_loss, step)
        self._scalar("loss/valid", valid.mean_loss, step)
        self.note(f"Time taken for epoch {epoch} is {seconds:.1f} sec")
        self.note(f"train loss={train.mean_loss:.5f}, valid loss={valid.mean_loss:.5f}")
        means = {"train": train.means, "valid": valid.means}
        for name in {**train.means, **valid.means}:
            splits = [split for split in means if name in means[split]]
            for split in splits:
                metrics[f"{split}_{name}"] = means[split][name]
                self._scalar(f"{name}/{split}", means[split][name], step)
            self.note(", ".join(f"{split} {name}={means[split][name]:.4f}" for split in splits))
        self._write("epoch", step, epoch, seconds=seconds, **metrics)
        self._draw(lambda events: events.flush())

    def close(self, state: str = "finished") -> None:
        """Ends the files, and the trackers' runs in that state: finished, failed or stopped."""
        self._draw(lambda events: events.close())
        for line in self._trackers.close(state):
            self.note(line)
        if self._bar:
            self._bar.close()
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
        self._jsonl.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **numbers}) + "\n")
        self._jsonl.flush()
        for line in self._trackers.add({"epoch": epoch, **metrics}, step):
            self.note(line)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self._draw(lambda events: events.add_scalar(tag, value, step))

    def _draw(self, call: Callable[[Events], object]) -> None:
        """Calls TensorBoard's writer, as long as it works: no tracker stops a training."""
        if self._events:
            try:
                call(self._events)
            except Exception as error:
                self._events = None
                self.note(untrusted.one_line(f"tracker tensorboard ends: {type(error).__name__}: {error}"))


class OwnReporter(Reporter):
    """The log of a loop of one's own, which has metrics of its own."""

    def steps(
        self,
        step: int,
        epoch: int,
        iteration: int,
        totals: Totals,
        lr: float,
        seconds: float,
        gradient_norm: float | None = None,
    ) -> None:
        rate, values = totals.count / seconds, {"loss": totals.mean_loss, **totals.means}
        for name, value in values.items():
            self._scalar(f"{name}/step", value, step)
        self._scalar("learning_rate", lr, step)
        self.note(f"Epoch: {epoch}, Iteration: {iteration}, {_listed(values)}, Avg examples/sec: {rate:.1f}")
        self._write("step", step, epoch, lr=lr, examples_per_second=rate, **values)

    def values(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """The end of an epoch: what it has reported."""
        seconds = time.monotonic() - self._epoch_began
        for name, value in values.items():
            self._scalar(name, value, step)
        self.note(f"Epoch: {epoch}, {_listed(values)} ({seconds:.1f} sec)")
        self._write("epoch", step, epoch, seconds=seconds, **values)
        self._draw(lambda events: events.flush())


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {value:.5g}" for name, value in values.items())


class _Bar:
    """A rich progress bar over all steps of the run."""

    def __init__(self, total: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        )
        self._task = self._progress.add_task("", total=total, completed=done)
        self._progress.start()

    def advance(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, description=text)

    def print(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


def _reopen(path: Path, first_step: int) -> IO[str]:
    """The file to append to, without the records of steps that a resumed run makes again."""
    try:
        if path.exists():
            with files.opened(path) as old, files.replacing(path) as new:
                new.writelines(f"{line}\n" for line in _lines(old) if _is_made(line, first_step))
        return path.open("a", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot append to {path}: {reason}; give another --output.") from None


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Its lines, those left out that are no text or longer than any of ours."""
    while line := file.readline(LINE_LIMIT):
        with contextlib.suppress(UnicodeDecodeError):
            yield line.decode().rstrip("\n")


def _is_made(line: str, first_step: int) -> bool:
    """Whether it is a record of a step that is not made again. A killed run's unfinished line is not."""
    try:
        step = files.parse_json(line)["step"]
    except (ValueError, LookupError, TypeError):
        return False
    return type(step) is int and 0 <= step <= first_step
