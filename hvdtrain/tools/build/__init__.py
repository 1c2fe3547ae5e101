"""`python -m hvdtrain build`: builds Horovod for the installed frameworks, installs it, and proves that it works."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Builds, installs and proves Horovod with the given flags. Raises BuildError where that fails."""
    from hvdtrain.core import flags
    from hvdtrain.terminal import Status
    from hvdtrain.tools.build.plan import Options, describe, plan
    from hvdtrain.tools.build.probe import probe
    from hvdtrain.tools.build.run import run

    options = flags.parse(Options, "python -m hvdtrain build", argv)
    options = dataclasses.replace(options, wheel_dir=wheel_dir(options.wheel_dir, os.environ))
    started = time.monotonic()
    with Status("looking at the frameworks, MPI and compilers here") as status:
        it = plan(probe(os.environ, options.cuda_home), options, wheel_dir(None, os.environ))
        if options.print:
            status.print(describe(it))
            return 0

        def report(line: str) -> None:
            status.print(f"{time.monotonic() - started:5.0f} s  {line}")
            status.update(line)

        status.print(f"Horovod for {', '.join(it.frameworks)}; MPI: {it.mpi_is}; GPU: {it.gpu} ({it.gpu_is})")
        run(it, os.environ, report, status.update)
        report(f"ready: {it.version}")
    return 0


def wheel_dir(requested: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder of finished wheels: the requested one, or hvdtrain/wheels in the user's cache."""
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (requested or Path(cache, "hvdtrain", "wheels")).expanduser().absolute()
