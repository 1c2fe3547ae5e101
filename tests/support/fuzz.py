"""Gives a reader of hvdtrain random inputs: `python fuzz.py READER SEED COUNT`. Prints the outcome as JSON.

A reader fails where it raises anything but one of hvdtrain's errors, hangs, or its message fills more than a screen or
holds control characters.
"""

import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import hostile_folders
from costs import peak_mib

from hvdtrain import cli
from hvdtrain.core import recipe
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import mpi, topology
from hvdtrain.launch.slurm import MOST_HOSTS, first_host, hosts
from hvdtrain.run import options
from hvdtrain.tools import plan as dry_run
from hvdtrain.tools import predict, slurm
from hvdtrain.tools.doctor import gather
from hvdtrain.tools.slurm.job_check import check_script
from hvdtrain.tools.slurm.sites import SITES
from hvdtrain.untrusted import one_line

SECONDS = 100  # of processor time, after which an input counts as hanging, on slow machines too
WAITED_SECONDS = 300  # of waiting, as for a pipe
HERE = Path(__file__).resolve().parents[2]
RECIPES = [
    path.read_bytes() for path in sorted((HERE / "hvdtrain" / "recipes").glob("*.yaml")) if path.stem != "cifar100"
]
SCRIPTS = [path.read_bytes() for path in sorted((HERE / "slurm").rglob("*.sh"))]
SCALING = b'{"batch": 16, "cores": 2, "ranks_per_node": 2, "weak": {"1": [1.0, 1.01], "2": [1.05], "4": [1.2]}}'
NUMBERS = [
    "0", "1", "-1", "2", "100", "0.5", "1e9", "1e-9", "1e400", "nan", "inf", "9" * 30, "9" * 4000, "9" * 5000,
    "0x1f", "1e", "1_0", "07", "0o7", "1:30", "٣", "²", "", "-", "+5", " 7", "None", "true", str(2**63), str(2**64),
    "1,2",
]  # fmt: skip
WORDS = [
    "a", "digits", "linear", "a b", "é", "\x1b[31m", "\x00", "\udcff", "\u2028", "x" * 300, "x" * 5000, "..", "/",
    "~", "\n", "/dev/zero", "/dev/null", "/proc/self/mem", ".", "[bold]", "{}", "%s", "$(id)", "'", '"', "\\", "--",
    "-", "-x", "=", ":",
]  # fmt: skip
YAML = [
    "default:\n", " ", "\n", "- ", "? ", ": ", "{", "}", "[", "]", ",", "&a ", "*a", "<<: ", "!!int ", "!!float ",
    "!!bool ", "!!set ", "!!omap ", "!!binary ", "!!timestamp ", "!!python/name:os.system ", "!x ", "|\n", ">\n",
    "---\n", "...\n", "#", "'", '"', "%YAML 1.1\n", "%TAG ! x\n", "2024-13-01", "extends: ", "fuzz.yaml",
    "fuzz.yaml:a", "linear", "model: linear\n",
]  # fmt: skip
BASH = [
    "#!/bin/bash\n", "#SBATCH --nodes=", "#SBATCH --ntasks-per-node=", "#SBATCH --gres=gpu:", "#SBATCH ",
    "# SBATCH -", "srun ", "python -m hvdtrain.torch x ", "torchrun ", "-n ", "\n", "\n", "\n", '"', "'", "\\",
    "\\\n", "<<EOF\n", "EOF\n", "<<'A'\n", "A\n", "$(", "$((", ")", "))", "(", "|", ";", "&&", ">", "<", "<<<",
    "# c", "MASTER_PORT=", "--rdzv-endpoint=", "$SLURM_JOB_ID", "${SLURM_JOB_ID: -4}", "tail -c 5", "RANK=0",
    "$SLURM_PROCID", "CUDA_VISIBLE_DEVICES=", "\r\n", "\x0c", "\t", " ",
]  # fmt: skip
NODES = [
    "nid", "[", "]", ",", "-", "001-004", "0-99999999", "1-99999", "7", "(x999999)", "1(x999999)", "2(x3)", "1",
    "i", "[1-9]", "٣",
]  # fmt: skip
JSON = [
    "{", "}", "[", "]", ",", ":", '"', "null", "NaN", "1e999", "9" * 5000, '"version"', '"rank"', '"seconds"',
    '"ranks"', "1", '""',
]  # fmt: skip
VALUES = [10**30, 10**5000, -1, 0, 1, 64, 1.5, 1e308, float("nan"), None, True, b"x", *WORDS, *NUMBERS, (1, 2)]
LINEAR = recipe.load("linear")
KNOWN = {
    "run": (
        "--epochs --batch-size --classes --image-size --examples --base-lr --lr-milestones --seed --model "
        "--data-dir --max-steps --accumulation-steps --warmup-epochs --workers --nesterov --dataset"
    ),
    "slurm": (
        "--site --nodes --time --account --job-name --gpus-per-node --cpus-per-task --mpi --check --launcher "
        "--list --partition --reservation --"
    ),
    "predict": (
        "--point --ranks --fixed-seconds --examples --batch --step-seconds --gradient-mb --link-gbit "
        "--ranks-per-node --cores --overlap --fusion-mb --latency-us --node-gbit --json --from"
    ),
}
FLAGS = {name: flags.split() for name, flags in KNOWN.items()}
VARIABLES = {
    name for row in topology.LAUNCHERS for name in (*row.signs, row.rank, row.size, row.local_rank, row.local_size)
}
VARIABLES |= {"SLURM_NODEID", "SLURM_JOB_ID", "PMI_JOBID", "PMIX_NAMESPACE", "PMIX_RANK", "PALS_APID", "GROUP_RANK"}


class Hang(BaseException):
    """Raised where a reader takes too long."""


def mutated(r: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, cut out, doubled or repeated many times."""
    for _ in range(r.randint(1, 6)):
        at, length = r.randrange(len(data) + 1), r.choice([1, 1, 2, 8, 64])
        piece = data[at : at + length]
        new = r.choice(
            [b"", bytes([r.randrange(256)]), piece * 2, piece * r.choice([3, 50, 5000]), r.randbytes(length)]
        )
        data = (data[:at] + new + data[at + length :])[: 2**20]
    return data


def soup(r: random.Random, atoms: list[str]) -> str:
    """Random atoms one after the other; in one text of ten, one of them very often."""
    pick = [r.choice(r.choice([atoms, atoms, NUMBERS, WORDS])) for _ in range(r.randint(1, 30))]
    if r.random() < 0.1:
        pick.insert(r.randrange(len(pick)), r.choice(atoms) * r.choice([10, 1000, 20_000]))
    return "".join(pick)[: 2**20]


def text(r: random.Random, atoms: list[str], corpus: list[bytes]) -> bytes:
    """A soup of atoms, or a mutated file of the corpus."""
    if r.random() < 0.5 or not corpus:
        return soup(r, atoms).encode(errors="surrogatepass")
    return mutated(r, r.choice(corpus))


def argv(r: random.Random, known: list[str]) -> list[str]:
    """Flags and values, most of them in order."""
    argv: list[str] = []
    for _ in range(r.randint(0, 6)):
        value = r.choice([r.choice(NUMBERS), r.choice(WORDS), f"{r.choice(NUMBERS)}:{r.choice(NUMBERS)}", "4:9", "8:5"])
        argv += [r.choice(known), value] if r.random() < 0.9 else [value]
    return argv


def value(r: random.Random, depth: int = 0) -> object:
    """A Python value of any kind."""
    if depth < 3 and r.random() < 0.2:
        items = [value(r, depth + 1) for _ in range(r.choice([0, 1, 3, 300 if depth == 2 else 5]))]
        return items if r.random() < 0.5 else {str(i): item for i, item in enumerate(items)}
    return r.choice(VALUES)


def read_recipe(r: random.Random) -> None:
    Path("fuzz.yaml").write_bytes(text(r, YAML, RECIPES))
    recipe.load(r.choice(["fuzz.yaml", "fuzz.yaml:a", "fuzz.yaml:default"]))


def read_validate(r: random.Random) -> None:
    keys = LINEAR.model_dump()
    recipe.validate({**keys, **{r.choice([*keys, "x", "\x1b"]): value(r) for _ in range(r.randint(1, 3))}})


def read_flags(r: random.Random) -> None:
    options.parse_run("python -m x", [r.choice(["linear", "synthetic"]), *argv(r, FLAGS["run"])])


def read_plan(r: random.Random) -> None:
    dry_run.main(["synthetic", "--ranks", r.choice([*NUMBERS, "2"]), *argv(r, FLAGS["run"])])


def read_environment(r: random.Random) -> None:
    names = r.sample(sorted(VARIABLES), r.randint(1, len(VARIABLES)))
    likely = [str(r.randint(0, 4)), "4", "1", soup(r, NODES), r.choice(NUMBERS), r.choice(WORDS), "1(x999999)" * 300]
    topology.discover({name: r.choice(likely) for name in names}, "host")


def read_step(r: random.Random) -> None:
    tasks = r.choice(
        [",".join(r.choice(["1(x999999)", "2(x3)", "1"]) for _ in range(r.randint(1, 400))), soup(r, NODES)]
    )
    environ = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": r.choice(["6", "299999700", "4"]), "SLURM_PROCID": "0"}
    environ |= {"SLURM_LOCALID": "0", "SLURM_NODEID": r.choice(NUMBERS), "SLURM_STEP_TASKS_PER_NODE": tasks}
    topology.discover({**environ, "SLURM_JOB_ID": r.choice([*WORDS, "7"])}, "host")


def read_nodes(r: random.Random) -> None:
    nodes = soup(r, NODES)
    with contextlib.suppress(HvdtrainError):
        first_host(nodes)
    assert len(hosts(nodes)) <= MOST_HOSTS


def read_script(r: random.Random) -> None:
    script = text(r, BASH, SCRIPTS).decode(errors="replace")
    found = check_script(script, r.choice([None, *SITES.values()]))
    assert all(len(line) < 1000 for each in found for line in (each.wrong, each.instead)), (
        "a finding that fills the screen"
    )


def read_check(r: random.Random) -> None:
    Path("job.sh").write_bytes(text(r, BASH, SCRIPTS))
    slurm.main(["--check", "job.sh"])


def read_slurm(r: random.Random) -> None:
    site = ["--site", r.choice([*SITES, "x"])] if r.random() < 0.8 else []
    slurm.main([*site, *argv(r, FLAGS["slurm"]), *(["--", *argv(r, WORDS)] if r.random() < 0.7 else [])])


def read_points(r: random.Random) -> None:
    predict.main(argv(r, FLAGS["predict"]))


def read_figures(r: random.Random) -> None:
    Path("scaling.json").write_bytes(text(r, JSON, [SCALING]))
    predict.main(["--from", "scaling.json", "--ranks", "8"])


def read_child(r: random.Random) -> None:
    values = gather.values_in(
        text(r, JSON, [b'{"rank": 1, "size": 2, "seconds": {"4": 0.1}, "clocks": [1.5]}']).decode(errors="replace")
    )
    assert isinstance(values, dict)


def read_library(r: random.Random) -> None:
    data = mutated(r, b"\x7fELF\0libmpi.so.40\0libmpich.so.12\0" + b"5.0.11\0CRAY MPICH version 8.1\0" * 3)
    Path("mpi_lib.so").write_bytes(data)
    mpi.SONAME.search(data)
    mpi._version(data, r.choice(["", *mpi.VENDORS]))


def read_command_line(r: random.Random) -> None:
    command = r.choice(["plan", "slurm", "predict", "bench", *WORDS])
    cli.main([command, *argv(r, FLAGS[r.choice(sorted(FLAGS))])])


READERS: dict[str, Callable[[random.Random], None]] = {
    name.removeprefix("read_"): reader for name, reader in list(globals().items()) if name.startswith("read_")
} | hostile_folders.READERS


def once(reader: Callable[[random.Random], None], r: random.Random) -> str:
    """How the reader failed on one input; "" where it did not."""
    output = io.StringIO()
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(WAITED_SECONDS)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            reader(r)
    except HvdtrainError as error:
        line = one_line(error)
        return "" if len(line) <= 2100 and line.isprintable() else f"a message of {len(line)} characters"
    except SystemExit:
        pass
    except BaseException:
        return traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    output.getvalue().encode()  # a lone surrogate, which a terminal cannot show, raises here
    return ""


def hang(*_: object) -> None:
    raise Hang


def main(name: str, seed: int, count: int) -> None:
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, hang)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number in range(seed, seed + count):
            if results := once(READERS[name], random.Random(f"{name} {number}")):
                wrong.append((number, results))
        os.chdir("/")
    peak = peak_mib()
    print(json.dumps({"reader": name, "inputs": count, "wrong": wrong[:5], "wrongs": len(wrong), "mib": peak}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
