"""The rules for the steps of a job script: how they are started, and with how many tasks, GPUs and CPUs."""

import bisect
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdtrain.core.wording import counted
from hvdtrain.launch.slurm import PLUGIN_NAMES
from hvdtrain.tools.slurm.script import JobScript, Option, program
from hvdtrain.tools.slurm.sites import Site
from hvdtrain.tools.slurm.steps import BY_MPI, PER_PART, TrainingStep
from hvdtrain.untrusted import whole_number

OURS = re.compile(r"\bhvdtrain\.(torch|tensorflow|lightning)")
ONE_GPU_A_RANK = re.compile(r"hvdtrain|horovod|hvd")
NAMES_RANKS = re.compile(r"--(?:node[-_]?|machine[-_])?rank\b|--dist[-_]url|--process[-_]id")
STARTS_OTHERS = re.compile(r"gpus?\b|device|nproc|world|ddp|parallel|distributed|strategy", re.IGNORECASE)
SRUN_CPUS = re.compile("SRUN_CPUS_PER_TASK=")
DEVICES = re.compile(r"\bCUDA_VISIBLE_DEVICES=[\"']?([\d,]+)")
USES_GPUS = re.compile(r"--nv\b|nvidia-smi|\bcuda\b|\bnccl\b|\bCUDA_|\bNCCL_|\b--rocm\b")
HOSTS = re.compile(
    r"-H|-?-host(s|file|name)?|--hostfile|--host-discovery-script|-hostfile|-machinefile|--no_ssh|--launcher"
)
ONE_DASH = {"-bind-to", "-map-by", "-rank-by"}
OTHER_LAUNCHERS = {"ssh", "pdsh", "clush", "parallel", "ray", "dask", "dask-mpi", "spark-submit", "pbsdsh"}
ALL = re.compile(r"^\$|(?:^|,)ALL(?:,|$)", re.IGNORECASE)
SRUN_EXPORTS = re.compile(r"\bunset\s[^;\n]*\bSLURM_EXPORT_ENV\b|\bSLURM_EXPORT_ENV=[\"']?ALL\b")
BASH_SIGNAL = re.compile(r"R?B:(\w+)((?:@\d+)?)", re.IGNORECASE)
NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
SENDS = re.compile(r"\b(?:p?kill|scancel|scontrol|touch)\b")
WAIT = re.compile(r"\bwait\b")
LOOPS = re.compile(
    r"\bkill -0\b|--pid\b|\bfor\b[^#]{0,1000}\bdo\b[^#]{0,500}\bwait\b"
    r"|\bwhile\b[^\n]{0,100}(?:\bwait\b|\bps\b|/proc/|\bjobs\b)"
    r"|\(\)\s*\{[^}]{0,1000}\bwait\b|\btrap\s[^\n]{0,200}\bwait\b[^\n]{0,50}\bEXIT\b"
)
"""Other ways to wait for a step: by its number, in a loop, in a function or at the script's end."""
SOURCED = re.compile(r"^\s*(?:source|\.)\s", re.MULTILINE)
NTASKS = ("ntasks", "ntasks-per-node", *PER_PART)
ONCE = "the job's script runs once, on its first node; only srun starts all tasks on all nodes"
SETS_TASKS = {"nodes", "exclusive", "exact", "overlap"}  # options by which a step may have fewer tasks than the job


@dataclass(frozen=True)
class Finding:
    """One mistake, or with `note` an advice: what may only cost time, or only go wrong at some sites."""

    line: int
    wrong: str
    why: str
    instead: str
    note: bool = False


@dataclass(frozen=True)
class Case:
    """A job script, its training steps, and the site that it is for, if that is known."""

    text: str
    script: JobScript
    site: Site | None
    steps: tuple[TrainingStep, ...]
    job: TrainingStep
    """The nodes and tasks of the job."""

    @property
    def trainings(self) -> tuple[TrainingStep, ...]:
        """The steps whose program is known."""
        return tuple(step for step in self.steps if step.program.kind != "script")

    @property
    def is_exclusive(self) -> bool:
        """Whether no other job may share the nodes."""
        option = self.script.by_name.get("exclusive")
        return option is not None and not option.value

    def searched(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
        """The matches, with their lines, in the text in which the job's shell fills in variables."""
        return ((self.line_of(found.start()), found) for found in pattern.finditer(self.script.expanded))

    def line_of(self, position: int) -> int:
        """The line of the script that has that character of the text."""
        return 1 + bisect.bisect_left(self._line_ends, position)

    @functools.cached_property
    def _line_ends(self) -> list[int]:
        return [found.start() for found in re.finditer("\n", self.script.text)]


Rule = Callable[[Case], Iterator[Finding]]


def _task_counts(case: Case) -> Iterator[Finding]:
    """--ntasks differs from nodes x tasks per node, or srun -n from both."""
    job = case.job
    per_node, tasks, nodes = job.number("ntasks-per-node"), job.number("ntasks"), job.nodes
    promised = per_node * nodes if per_node and nodes else None
    if tasks and promised and tasks != promised and "nodes" in job.options:
        wrong = f"--ntasks={tasks}, but {nodes} x {per_node} tasks a node"
        why = "where both are given SLURM takes --ntasks, and --ntasks-per-node is an upper limit only"
        instead = f"#SBATCH --ntasks={promised}, or leave --ntasks out"
        yield Finding(job.options["ntasks"].line, wrong, why, instead, note=True)
    total = tasks or promised
    for step in case.trainings:
        requested = whole_number(step.of_srun["ntasks"].value) if "ntasks" in step.of_srun else None
        if requested and total and requested != total and not SETS_TASKS & step.of_srun.keys():
            why = f"the job has {counted(total, 'task')}; the step would leave some of them idle, or not start"
            wrong, instead = f"srun -n {step.of_srun['ntasks'].value}", "srun without -n takes all tasks of the job"
            yield Finding(step.line, wrong, why, instead, note=requested < total)


def _tasks_and_gpus(case: Case) -> Iterator[Finding]:
    """There is not one rank for each GPU, or not one torchrun for each node."""
    is_one_process = case.job.nodes == case.job.tasks_per_node == 1
    for step in case.trainings:
        gpus = step.gpus_per_node(case.site)
        if gpus == 0:
            request = f"#SBATCH --gres=gpu:{case.site.gpus if case.site else 1}"
            yield Finding(step.line, "no GPU is requested", "SLURM gives a job only the GPUs it requests", request)
        elif step.launcher in BY_MPI:
            yield from _by_mpi(step, gpus)
        elif step.is_torchrun:
            yield from _torchruns(case, step, gpus)
        elif step.launcher and gpus:
            yield from _ranks_and_gpus(step, gpus)
        elif gpus and gpus > 1 and is_one_process and not STARTS_OTHERS.search(" ".join(step.program.words)):
            why = "it uses one, unless it starts a process for each, or spreads its model over them"
            instead = f"torchrun --standalone --nproc-per-node={gpus}"
            yield Finding(step.line, f"1 process, {gpus} GPUs", why, instead, note=True)


def _torchruns(case: Case, step: TrainingStep, gpus: int | None) -> Iterator[Finding]:
    """A node has several torchruns, or a torchrun that is alone on it has more or fewer ranks than GPUs."""
    name, ranks, tasks = step.program.kind, step.ranks_per_node, step.tasks_per_node
    several = tasks if step.launcher == "srun" and tasks and tasks > 1 else None
    if several and ranks != 1:
        why = f"{name} starts the ranks of its node itself: {several} of them start {several} times as many"
        yield Finding(_line_of_tasks(step), f"{several} {name}s a node", why, "#SBATCH --ntasks-per-node=1")
    elif several and gpus:
        yield from _ranks_and_gpus(step, gpus)
    elif ranks and gpus and ranks != gpus and not any(program(it.words) == "wait" for it in case.script.commands):
        wrong = f"{counted(ranks, 'rank')} a node, {counted(gpus, 'GPU')}"
        flag = f"--nproc-per-node={gpus}" if name == "torchrun" else f"{counted(gpus, 'rank')} a node"
        yield Finding(step.line, wrong, f"one rank drives one GPU: {_outcome(ranks, gpus)}", f"{name} {flag}")


def _ranks_and_gpus(step: TrainingStep, gpus: int) -> Iterator[Finding]:
    """There are more or fewer tasks than GPUs: a mistake for Horovod, and where there are several tasks or nodes."""
    tasks, given, words = step.tasks_per_node, _tasks_option(step), " ".join(step.program.words)
    if not tasks or tasks == gpus or "ntasks-per-gpu" in step.options:
        return
    right = f"--ntasks={gpus * (step.nodes or 1)}" if given and given.name == "ntasks" else f"--ntasks-per-node={gpus}"
    where = "srun" if given and given.name in step.of_srun else "#SBATCH"
    may_start_others = tasks == 1 and not ONE_GPU_A_RANK.search(words)
    note = may_start_others and bool(step.nodes == 1 or NAMES_RANKS.search(words))
    unless = ", unless it starts the others itself" if note else ""
    wrong = f"{counted(tasks, 'task')} a node, {counted(gpus, 'GPU')}"
    why = f"one task, that is one rank, drives one GPU{unless}: {_outcome(tasks, gpus)}"
    yield Finding(_line_of_tasks(step), wrong, why, f"{where} {right}", note=note)


def _by_mpi(step: TrainingStep, gpus: int | None) -> Iterator[Finding]:
    """mpirun starts more or fewer ranks than GPUs, or horovodrun has no hosts."""
    words, nodes = step.call, step.nodes
    after = (words[i + 1] for i, word in enumerate(words[:-1]) if word in {"-n", "-np", "--np", "--num-proc"})
    ranks = whole_number(next(after, ""))
    if gpus and ranks and nodes and ranks != gpus * nodes:
        why = f"one rank drives one GPU: {_outcome(ranks, gpus * nodes)}"
        wrong, instead = f"{counted(ranks, 'rank')}, {gpus * nodes} GPUs", f"{step.launcher} -np {gpus * nodes}"
        yield Finding(step.line, wrong, why, instead, note=ranks == 1)
    tasks = nodes * step.tasks_per_node if nodes and step.tasks_per_node else None
    if step.launcher.startswith("mpi") and ranks and tasks and ranks > tasks:
        why = "mpirun has as many slots as the job has tasks: it may refuse to start more"
        wrong = f"{ranks} ranks, {counted(tasks, 'task')}"
        yield Finding(step.line, wrong, why, f"#SBATCH --ntasks={ranks}", note=True)
    if step.launcher == "mpirun" and (given := next((word for word in words if word in ONE_DASH), None)):
        yield Finding(step.line, given, "Open MPI 5 takes it for the program to start", f"-{given}", note=True)
    if step.launcher == "horovodrun" and (nodes or 1) > 1 and not any(map(HOSTS.match, words)):
        why = "without a list of hosts horovodrun starts all ranks on the job's first node"
        yield Finding(step.line, "horovodrun without -H", why, "srun, or horovodrun -H HOST:GPUS,...")


def _tasks_option(step: TrainingStep) -> Option | None:
    """The first option that sets the number of tasks: one of srun, else one of the job."""
    given = [step.of_srun[name] for name in NTASKS if name in step.of_srun]
    given = given or [step.options[name] for name in NTASKS if name in step.options]
    return min(given, key=lambda option: option.line, default=None)


def _line_of_tasks(step: TrainingStep) -> int:
    option = _tasks_option(step)
    return option.line if option else step.line


def _outcome(ranks: int, gpus: int) -> str:
    return "GPUs would idle, and cost" if ranks < gpus else "some would have to share one"


def _no_gpu(case: Case) -> Iterator[Finding]:
    """The script uses GPUs, but requests none."""
    requests = any("gpu" in option.value or "gpu" in option.name for option in case.script.options)
    requests = requests or any("gpu" in word for step in case.steps for word in step.call)
    if case.site or requests or case.is_exclusive or "gres" in case.script.by_name:
        return
    for step in case.trainings[:1]:
        if step.is_torchrun or USES_GPUS.search(case.script.text):
            why = "most sites give a job only the GPUs it requests"
            yield Finding(step.line, "no GPU is requested", why, "#SBATCH --gres=gpu:4", note=True)


def _cpus(case: Case) -> Iterator[Finding]:
    """Each task has one CPU, or a node has fewer CPUs than its tasks request."""
    exported = next((line for line, _ in case.searched(SRUN_CPUS)), None)
    alike, site = set(), case.site
    for step in case.trainings:
        option, tasks, cpus = step.options.get("cpus-per-task"), step.tasks_per_node, step.number("cpus-per-task")
        unset = "cpus-per-task" not in step.of_srun and (exported is None or exported > step.line)
        has_more = any(name in step.options for name in ("cpus-per-gpu", "ntasks-per-socket", "extra-node-info"))
        starts = bool(step.launcher) or case.job.tasks_per_node == 1  # others of its tasks' CPUs are not taken
        if option is None and starts and not (has_more or case.is_exclusive or "none" in alike):
            alike.add("none")
            usual = f"--cpus-per-task={site.cpus // site.gpus if site else 'N'}"
            why = "each task gets one CPU, for training and for loading data"
            yield Finding(step.line, "no --cpus-per-task", why, f"#SBATCH {usual}", note=True)
        elif option and unset and cpus != 1 and step.launcher == "srun" and not (case.is_exclusive or "srun" in alike):
            alike.add("srun")
            why = "since SLURM 22.05 srun does not take --cpus-per-task from #SBATCH: each task may get one CPU"
            instead = 'before it: export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
            yield Finding(step.line, "SRUN_CPUS_PER_TASK is not set", why, instead, note=True)
        tasks = min(tasks, step.gpus_per_node(site) or tasks) if tasks else None  # what is right once that is
        if option and cpus and tasks and site and tasks * cpus > site.cpus:
            why = f"a node of {site.title} has {site.cpus} CPUs to give: the job is refused or waits forever"
            fit = max(1, site.cpus // tasks)
            yield Finding(option.line, f"{tasks} tasks x {cpus} CPUs", why, f"#SBATCH --cpus-per-task={fit}")


def _no_launcher(case: Case) -> Iterator[Finding]:
    """A training that no launcher starts on all tasks or nodes."""
    job, commands = case.job, case.script.commands
    launched = any(step.launcher for step in case.steps) or any(program(it.words) in OTHER_LAUNCHERS for it in commands)
    launched = launched or any(program(it.words) == "srun" and OTHER_LAUNCHERS & set(it.words) for it in commands)
    gpus = job.gpus_per_node(case.site)
    # As many tasks as GPUs are ranks; others are a way to request CPUs.
    are_ranks = job.nodes == 1 and bool(gpus and gpus > 1 and job.tasks_per_node == gpus)
    for step in case.trainings:
        words, kind = step.program.words, step.program.kind
        is_ours = OURS.search(" ".join(words)) and not (job.nodes == 1 and job.tasks_per_node == 1)
        if step.launcher or (launched and not is_ours):
            continue
        if kind == "deepspeed" and (job.nodes or 1) > 1:
            if not any(map(HOSTS.match, words)):
                why = "without a list of hosts deepspeed starts ranks on the job's first node only"
                yield Finding(step.line, "deepspeed without --hostfile", why, "deepspeed --hostfile=FILE, or srun")
        elif is_ours or (job.nodes or 1) > 1 or (kind == "python" and are_ranks):
            name = program(words)
            yield Finding(step.line, f"{name} without srun", ONCE, f"srun {' '.join(words[:3])} ...")


def _devices(case: Case) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES lists fewer GPUs than a node has tasks."""
    tasks = max((step.tasks_per_node or 0 for step in case.trainings if step.launcher), default=0)
    for line, found in case.searched(DEVICES):
        visible = len(found[1].strip(",").split(","))
        if tasks > visible:
            why = f"{tasks} tasks of a node would share {counted(visible, 'GPU')}"
            yield Finding(line, found[0], why, "leave it out: SLURM sets it to the GPUs of the job")


def _hidden_gpus(case: Case) -> Iterator[Finding]:
    """Each task sees its own GPU alone, where SLURM isolates devices."""
    for step in case.trainings:
        given = [step.options[name] for name in ("gpu-bind", "gpus-per-task", "ntasks-per-gpu") if name in step.options]
        several = step.launcher == "srun" and step.tasks_per_node != 1 and step.gpus_per_node(case.site) != 1
        if several and given and given[0].value != "?" and not given[0].value.endswith("none"):
            # NVIDIA/nccl#1066, BLAST-WarpX/warpx#6382: CUDA opens no memory of a GPU that a control group hides.
            why = "NCCL may then not reach the node's other GPUs by NVLink, but through memory or sockets"
            instead = f"#SBATCH --gpus-per-node={step.gpus_per_node(case.site) or 'N'}, and srun --gpu-bind=none"
            yield Finding(given[0].line, f"--{given[0].name}={given[0].value}", why, instead, note=True)


def _plugin(case: Case) -> Iterator[Finding]:
    """srun has no PMI plugin for an MPI program, or an unknown one."""
    for step in case.trainings:
        option = step.of_srun.get("mpi")
        is_wrapped = step.is_torchrun or any("TF_CONFIG" in word for word in step.call)
        uses_mpi = not is_wrapped and any("hvdtrain" in word or "horovod" in word for word in step.call)
        usual = case.site.mpi if case.site else "pmix"
        if option and not PLUGIN_NAMES.fullmatch(option.value):
            why = "SLURM's own plugins are pmix, pmi2, cray_shasta, none"
            yield Finding(step.line, f"srun --mpi={option.value}", why, "see: srun --mpi=list", note=True)
        elif uses_mpi and usual and option is None and step.launcher == "srun":
            why = "where the site's default is not the MPI's own, every rank would be rank 0 of 1"
            yield Finding(step.line, "srun without --mpi", why, f"srun --mpi={usual}", note=True)


def _comes_back(case: Case) -> Iterator[Finding]:
    """The options are missing with which hvdtrain resumes after the time limit."""
    ours = [step for step in case.trainings if step.launcher and any("hvdtrain" in word for word in step.call)]
    for name, option in (("signal", "--signal=USR2@120"), ("requeue", "--requeue")) if ours else ():
        if name not in case.script.by_name:
            why = "at its time limit hvdtrain could not save a checkpoint and come back by itself"
            yield Finding(ours[0].line, f"no --{name}", why, f"#SBATCH {option}", note=True)


def _exported(case: Case) -> Iterator[Finding]:
    """srun does not give all variables to its tasks."""
    for step in case.trainings:
        option = step.options.get("export") if step.launcher == "srun" else None
        of_job = "export" not in step.of_srun
        if option is None or ALL.search(option.value) or (of_job and SRUN_EXPORTS.search(case.script.text)):
            continue
        more = "" if option.value.upper() in {"NONE", "NIL"} else f",{option.value}"
        where = "#SBATCH" if of_job else "srun"
        unless = ", or before srun: export SLURM_EXPORT_ENV=ALL" if of_job else ""
        why = "srun's tasks get nothing else: no PATH of an environment, no module, nothing that the script exports"
        yield Finding(option.line, f"--export={option.value}", why, f"{where} --export=ALL{more}{unless}")


def _signal_of_bash(case: Case) -> Iterator[Finding]:
    """SLURM sends its signal only to the script's bash, which does not pass it on."""
    option = case.script.by_name.get("signal")
    found = BASH_SIGNAL.fullmatch(option.value) if option else None
    if not option or not found:
        return
    name, text = _signal_name(found[1]), case.script.text
    traps = [command.words[1:] for command in case.script.commands if command.words[0] == "trap"]
    traps = [words[1:] if words[:1] == ("--",) else words for words in traps]
    handlers = {_signal_name(signal): words[0] for words in traps for signal in words[1:]}
    for step in case.trainings:
        if step.is_shell:
            continue
        wrong, instead = f"--signal={option.value}", f"#SBATCH --signal={name}{found[2]}, which srun gives to its tasks"
        if handlers.get(name, "") in {"", "-"} or not SENDS.search(text):
            why = (
                "B: sends it to the script's bash alone, which no trap passes on; without one bash ends, and all steps"
            )
            yield Finding(option.line, wrong, why, instead, note=bool(SOURCED.search(text)))
        elif not step.in_background and step.launcher:
            why = f"bash runs its trap only after {step.launcher or program(step.call)}, which line {step.line} starts"
            yield Finding(option.line, wrong, why, f"{instead}; or end that line with &, and wait")
        elif step.in_background and len(WAIT.findall(text)) < 2 and not LOOPS.search(text):
            why = "the trap ends bash's wait: the script ends then, and the step before it has saved"
            instead = f"{instead}; or wait a second time, in the trap or behind wait"
            yield Finding(option.line, wrong, why, instead, note=True)


def _signal_name(signal: str) -> str:
    return NUMBERS.get(signal, signal.upper().removeprefix("SIG"))


def _not_waited_for(case: Case) -> Iterator[Finding]:
    """The script does not wait for a step in the background, which then ends with the script."""
    script, aside = case.script, [step for step in case.trainings if step.in_background]
    waits = [command for command in script.commands if command.words[0] == "wait"] if aside else []
    looped = LOOPS.search(script.text)
    for number, step in enumerate(aside, 1):
        after = [it.words[1:] for it in waits if it.line >= step.line]
        if looped or any(not words or "[@]" in "".join(words) or "[*]" in "".join(words) for words in after):
            continue
        if after and sum(map(len, after)) >= len(aside) - number + 1:
            continue
        is_alone = not after and not any(it.line > step.line and not it.in_background for it in case.trainings)
        why = "the job ends with its script, which does not wait for this step, and the step with it"
        yield Finding(
            step.line, f"{program(step.call)} ... &", why, "wait, as the script's last line", note=not is_alone
        )


RULES: tuple[Rule, ...] = (
    _exported,
    _signal_of_bash,
    _not_waited_for,
    _task_counts,
    _tasks_and_gpus,
    _no_gpu,
    _cpus,
    _no_launcher,
    _devices,
    _hidden_gpus,
    _plugin,
    _comes_back,
)
