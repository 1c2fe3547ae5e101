"""`python -m hvdtrain slurm --site NAME -- COMMAND`: prints or submits a site's job script, or checks one."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import nearest
from hvdtrain.errors import JobError, RecipeError
from hvdtrain.files import read_bytes
from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.tools.slurm.job_check import LONGEST, MOST_BYTES, RANK_VARIABLE, findings_of, read, report
from hvdtrain.tools.slurm.script import syntax_errors
from hvdtrain.tools.slurm.sites import SITES, TIME, Site, table
from hvdtrain.tools.slurm.step_rules import Finding
from hvdtrain.untrusted import printable
from hvdtrain.untrusted import quoted as shown

PROG = "python -m hvdtrain slurm"
AS_IN = f"give it after --, as in: {PROG} --site NAME -- python -m hvdtrain.torch linear"
NAME = r"(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
Count = Annotated[int, Field(ge=1, le=1_000_000)]


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Prints the job script that starts COMMAND (after --) on a site's nodes, or checks one.

    The arguments of COMMAND reach it unchanged, but for $NAME and ${NAME}, which the job's shell fills in: quote
    '$WORK' here for the job to have its own. `--launcher torchrun` takes `python -m MODULE` or `python FILE`.
    """

    site: Annotated[str | None, Flag(", ".join(SITES))] = None
    nodes: Count = 1
    spare: Annotated[
        int, Field(ge=0, le=1_000_000), Flag("nodes more, each of which replaces a lost one", metavar="N")
    ] = 0
    expedite: Annotated[
        bool, Flag("start again before all other jobs when the first node is lost; SLURM 25.11 and later")
    ] = False
    time: Annotated[str | None, Flag("HH:MM:SS; left out: the site's usual", metavar="TIME")] = None
    account: Annotated[str | None, Flag("the project that pays", metavar="NAME")] = None
    partition: Annotated[str | None, Flag("left out: the site's", metavar="NAME")] = None
    reservation: Annotated[str | None, Flag("of a course", metavar="NAME")] = None
    mpi: Annotated[str | None, Flag("srun's plugin: pmix, pmi2, ...", metavar="PLUGIN")] = None
    launcher: Annotated[
        Literal["srun", "torchrun", "tf-config"],
        Flag("srun: one task a GPU; torchrun: one task a node; tf-config: one GPU a node and TF_CONFIG"),
    ] = "srun"
    job_name: Annotated[str, Flag(metavar="NAME")] = "hvdtrain"
    gpus_per_node: Annotated[Count | None, Flag("left out: all of the site's", metavar="N")] = None
    cpus_per_task: Annotated[Count | None, Flag("left out: the GPU's fraction of a node", metavar="N")] = None
    submit: Annotated[bool, Flag("give it to sbatch and print the job's number")] = False
    check: Annotated[Path | None, Flag("report what is wrong with this job script", metavar="FILE")] = None
    list: Annotated[bool, Flag("the sites and their shapes")] = False


def main(argv: Sequence[str]) -> int:
    """Prints, submits or checks a job script; 1 where a checked one has errors. Raises JobError."""
    end = argv.index("--") if "--" in argv else len(argv)
    command = tuple(argv[end + 1 :])
    try:
        options: Options = flags.parse(Options, PROG, argv[:end])
    except RecipeError as error:
        if command or "belongs to no flag" not in str(error):
            raise
        raise JobError(f"no -- before the command; {AS_IN}") from None
    if options.list:
        print(table())
        return 0
    if options.check:
        return _check(options.check, options.site)
    if options.site is None:
        raise JobError(f"--site is missing; give the site where the job will run: {', '.join(SITES)}.")
    script = render(site_named(options.site), options, command)
    print(submit(script) if options.submit else script, end="\n" if options.submit else "")
    return 0


def site_named(name: str) -> Site:
    """The site of that name. Raises JobError where there is none."""
    if name not in SITES:
        raise JobError(f"unknown site {shown(name)}.{nearest(name, list(SITES))} Sites: {', '.join(SITES)}.")
    return SITES[name]


def render(site: Site, options: Options, command: Sequence[str], starts_steps: bool = False) -> str:
    """The text of the job script. Raises JobError where an option or the command breaks a rule.

    `starts_steps`: the command starts srun itself, so that it runs once, on the first node, and is not requeued.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    _refuse_bad_options(site, options, command)
    gpus, tasks, cpus = _shape(site, options)
    has_all_gpus = gpus == site.gpus
    memory = f"{site.memory_gib * gpus // site.gpus}G" if site.memory_gib else None
    uses_tensorflow = options.launcher == "tf-config" or any("tensorflow" in argument for argument in command)
    framework = site.frameworks.get("tensorflow" if uses_tensorflow else "torch")
    environment = Environment(
        loader=PackageLoader("hvdtrain.tools.slurm", ""),
        autoescape=select_autoescape(),  # escapes HTML alone: the command must stay as it is
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("job.sbatch").render(
        prog=PROG,
        site=site,
        options=options,
        tasks=tasks,
        cpus=cpus,
        memory=site.tf_memory if options.launcher == "tf-config" else memory,
        modules=[*site.modules, *([framework] if framework else [])],
        is_ours=any("hvdtrain" in argument for argument in command),
        variables=[row for row in site.environment if has_all_gpus or row[0] != "CUDA_VISIBLE_DEVICES"],
        starts_steps=starts_steps,
        plugin=options.mpi or (site.mpi if options.launcher == "srun" else None),
        gpus=gpus,
        gpu_order=site.gpu_order if has_all_gpus else None,
        command=quoted(_for_torchrun(command) if options.launcher == "torchrun" and not starts_steps else command),
    )


def quoted(arguments: Sequence[str]) -> str:
    """The arguments as text for a shell, which leaves them unchanged, but fills in $NAME and ${NAME}."""

    def one(argument: str) -> str:
        if not re.search(rf"\${NAME}", argument):
            return shlex.quote(argument)
        escaped = re.sub(rf'[\\"`]|\$(?!{NAME})', r"\\\g<0>", argument)
        return f'"{escaped}"'

    return " ".join(map(one, arguments))


def submit(script: str) -> str:
    """Gives the script to sbatch, and returns the number of the job. Raises JobError."""
    try:
        return slurm.submit(script)
    except SlurmError as error:
        if error.cause in {"missing", "cannot run"}:
            raise JobError(
                "--submit needs sbatch on the PATH, got none; go to a login node of the cluster, or leave --submit "
                "out, take the printed script there and type: sbatch FILE"
            ) from None
        reason = error.message or "no reason given"
        raise JobError(f"sbatch refused the script: {reason}; change the flag it names.") from None


def _check(path: Path, name: str | None) -> int:
    site = site_named(name) if name and name != "generic" else None
    try:
        text = read_bytes(path, MOST_BYTES).decode()  # as bytes: reading as text would hide Windows line ends
    except (OSError, ValueError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = "it is not text" if is_binary else getattr(error, "strerror", None) or error
        raise JobError(f"--check must name a job script that can be read, got {path}: {reason}.") from None
    why, instead = "bash cannot read the script to its end", "correct it, until this prints nothing: bash -n FILE"
    refused = [Finding(line, printable(message, LONGEST), why, instead) for line, message in syntax_errors(text)]
    case = read(text, site)
    findings = sorted([*findings_of(case), *refused], key=lambda finding: finding.line)
    print(report(str(path), findings, case))
    return int(any(not finding.note for finding in findings))


def _refuse_bad_options(site: Site, options: Options, command: Sequence[str]) -> None:
    if not command:
        raise JobError(f"no command to run; {AS_IN}")
    for argument in command:  # what no file can hold, or a terminal would act on, may not be in a script
        if len(argument) > MOST_BYTES or not argument.replace("\n", "").replace("\t", "").isprintable():
            raise JobError(f"the command must be text of at most {MOST_BYTES:,} characters, got {shown(argument)}.")
    if found := RANK_VARIABLE.search(" ".join(command)):
        raise JobError(
            f"the command's ${found.group(1)} would be filled in by the job's shell, the same for every rank; "
            "read it in the program, or in a script of your own that the command starts."
        )
    for name in ("account", "partition", "reservation", "job_name"):
        value = getattr(options, name)
        if value is not None and not re.fullmatch(r"[\w.@%+,-]+", value):
            raise JobError(
                f"--{name.replace('_', '-')} must be one word of letters, digits and .@%+,-_, got {shown(value)}."
            )
    if options.time is not None and not TIME.fullmatch(options.time):
        raise JobError(f"--time must read like 02:00:00 or 1-12:00:00 (a day and a half), got {shown(options.time)}.")
    slurm.check_plugin(options.mpi)
    pattern, example = site.account
    if options.account and not re.fullmatch(pattern, options.account):
        raise JobError(f"--account must read like {example} at this site, got {shown(options.account)}.")
    gpus, tasks, cpus = _shape(site, options)
    is_known = site is not SITES["generic"]
    if is_known and gpus > site.gpus:
        raise JobError(f"--gpus-per-node must lie in [1, {site.gpus}] at {site.title}, got {gpus}.")
    if is_known and tasks * cpus > site.cpus:
        raise JobError(f"{tasks} tasks x {cpus} CPUs exceed the {site.cpus} CPUs of a node; lower --cpus-per-task.")


def _shape(site: Site, options: Options) -> tuple[int, int, int]:
    """GPUs and tasks per node, and CPUs per task."""
    gpus = options.gpus_per_node or (1 if options.launcher == "tf-config" else site.gpus)
    tasks = gpus if options.launcher == "srun" else 1
    return gpus, tasks, options.cpus_per_task or site.cpus // site.gpus * (gpus // tasks)


def _for_torchrun(command: Sequence[str]) -> tuple[str, ...]:
    """The command in torchrun's form: `-m MODULE` or `FILE` without python; any other program behind --no-python."""
    is_python = re.fullmatch(r"python[\d.]*", Path(command[0]).name)
    if is_python and len(command) > 1 and (command[1] == "-m" or not command[1].startswith("-")):
        return tuple(command[1:])
    return ("--no-python", *command)
