"""`python -m hvdtrain bench WHAT`: benchmarks that compare in interleaved rounds."""

import importlib
from collections.abc import Sequence

from hvdtrain.core.wording import nearest
from hvdtrain.errors import RecipeError
from hvdtrain.terminal import Status
from hvdtrain.untrusted import quoted

WHATS = {
    "train": ("hvdtrain.tools.bench.train", "reading, computing and communication alone and together: what limits"),
    "allreduce": ("hvdtrain.tools.bench.allreduce", "Horovod's and torch.distributed's allreduce, size by size"),
    "scaling": ("hvdtrain.tools.bench.scaling", "the step on 1, 2, 4, ... ranks, weak and strong, and its efficiency"),
    "engines": ("hvdtrain.tools.bench.engines", "every engine's step time"),
}

HELP = """usage: python -m hvdtrain bench WHAT [flags]

what is measured:
{whats}

WHAT --help lists its flags."""


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; the exit code. Raises HvdtrainError."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(HELP.format(whats="\n".join(f"  {name:11}{text}" for name, (_, text) in WHATS.items())))
        return 0 if argv else 2
    name, *rest = argv
    if name not in WHATS:
        raise RecipeError(
            f"there is no benchmark {quoted(name)}.{nearest(name, list(WHATS))} Take one of {', '.join(WHATS)}."
        )
    with Status(f"bench {name}"):  # a busy machine imports for seconds
        benchmark = importlib.import_module(WHATS[name][0])
    return int(benchmark.main(rest))
