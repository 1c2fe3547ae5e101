"""The job scripts kept under slurm/, as they stand, on a SLURM of each site's shape; what --check finds, SLURM does."""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Minicluster, losses, minicluster
from marks import marked
from paths import REPOSITORY
from ranks import Ended, once, wait_until
from site_scripts import SCRIPTS

from hvdtrain.tools.slurm import Options, render
from hvdtrain.tools.slurm.job_check import check_script
from hvdtrain.tools.slurm.sites import SITES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LINEAR = ("python", "-m", "hvdtrain.torch", "linear")
# What the nodes of a site are called: nid001, or with these letters.
HOSTNAMES = {"juwels-booster": "jwb", "cori-gpu": "cgpu", "capella": "c", "alpha": "i8"}
# Sixteen ranks take two cores their time, and these scripts are Capella's or Jean Zay's but for numbers.
LIKE_OTHERS = [("alpha", "torchrun"), ("generic", "torchrun"), ("jean-zay-gpu-p2", "srun")]
TRAINING = [(name, how) for name, how in SCRIPTS if how != "tf-config" and (name, how) not in LIKE_OTHERS]
# Open MPI does not know Cray's plugin: here Perlmutter's script is refused as it stands.
CRAY = ("perlmutter", "srun")


@dataclass(frozen=True)
class Job:
    """A job that is over: its state in SLURM, its log, and its run folder."""

    state: dict[str, str]
    log: str
    run: Path

    @property
    def ranks(self) -> int:
        """How many trained, as the run itself prints."""
        return int(re.search(r"ranks       (\d+) ranks", self.log)[1])

    @property
    def ending(self) -> tuple[str, str]:
        return self.state["JobState"], self.state["ExitCode"]


def over(cluster: Minicluster, number: str) -> Job:
    state = cluster.ended(number)
    return Job(state, Path(state["StdOut"]).read_text(), Path(state["WorkDir"]) / "runs" / "linear" / number)


def submit(cluster: Minicluster, script: Path, folder: Path | None = None) -> str:
    return cluster.run("sbatch", "--parsable", script, cwd=folder).good().out.strip()


def hostname(name: str) -> str:
    return HOSTNAMES.get(name, "nid")


def shape(name: str) -> list[object]:
    """The flags of `minicluster up` for two nodes like the site's."""
    site = SITES[name]
    threads = 2 if site.hint == "nomultithread" else 1  # of a core, while a CPU of the site is a whole one
    flags: list[object] = ["--nodes", 2, "--cpus", site.cpus * threads, "--threads-per-core", 2]
    flags += ["--gpus", site.gpus if site.gres else 0, "--hostname", hostname(name)]
    flags += ["--mem", f"{site.memory_gib}G"] if site.memory_gib else []
    partitions = site.partitions
    flags += ["--partition", *partitions] if partitions else []
    flags += [
        "--feature",
        ",".join(sorted({name for constraint in site.constraints for name in constraint.split("&")})),
    ]
    return [*flags, *(["--fabric", "ib0", "--fabric-suffix", site.host_suffix] if site.host_suffix else [])]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """site("alpha"): a cluster of that site's shape, brought up once."""
    with contextlib.ExitStack() as stack:
        yield once(lambda name: stack.enter_context(minicluster(tmp_path_factory.mktemp(name), *shape(name))))


@pytest.fixture(scope="module")
def job_of(site) -> Callable[[str, str], Job]:
    """job_of("alpha", "torchrun"): the end of that script's job on its site; each is submitted once."""

    @once
    def of(name: str, launcher: str) -> Job:
        cluster = site(name)
        script = REPOSITORY / "slurm" / name / f"{launcher}.sbatch"
        if launcher == "srun --mpi=pmix":
            script = cluster.folder / "pmix.sbatch"
            kept = (REPOSITORY / "slurm" / name / "srun.sbatch").read_text()
            script.write_text(render(SITES[name], Options(nodes=2, mpi="pmix"), command_of(kept)))
        return over(cluster, submit(cluster, script))

    return of


def command_of(script: str) -> list[str]:
    """What a script for srun trains."""
    return re.search(r"python -m hvdtrain\..*", script)[0].split()


WORKING = [("perlmutter", "srun --mpi=pmix") if form == CRAY else form for form in TRAINING]


# One site is enough, whose eight ranks take two cores a minute to start; test_launch.py has the other launchers.
@pytest.mark.parametrize(("name", "launcher"), marked(WORKING, fast={"generic"}))
def test_a_sites_script_trains_on_all_its_gpus(job_of, name, launcher):
    job = job_of(name, launcher)
    assert job.ending == ("COMPLETED", "0:0"), job.log
    ranks, started = 2 * SITES[name].gpus, launcher.split()[0]
    assert f"ranks       {ranks} ranks, {started}, horovod on cpu (torch)\n" in job.log
    assert f"finished at step 75; everything is in runs/linear/{job.state['JobId']}\n" in job.log
    assert losses(job.run)[-1][0] == 75


@pytest.mark.slow
def test_a_plugin_that_mpi_does_not_know_is_refused_with_the_fix(job_of):
    job = job_of(*CRAY)
    assert job.ending == ("FAILED", "2:0"), job.log
    (error,) = (line for line in job.log.splitlines() if "Error" in line)
    assert error.startswith(
        "WorldError (rank 0 on nid001): srun started 8 tasks with the plugin cray_shasta, but this "
    )
    assert "; start with: srun --mpi=pmix (" in error


@pytest.mark.slow
def test_the_same_losses_at_every_site_to_the_bit(job_of):
    jobs = {form: job_of(*form) for form in WORKING}
    for ranks in {job.ranks for job in jobs.values()}:
        runs = {form: losses(job.run) for form, job in jobs.items() if job.ranks == ranks}
        first = next(iter(runs.values()))
        assert [form for form, run in runs.items() if run != first] == []


@pytest.mark.parametrize(
    "name", marked([name for name, launcher in SCRIPTS if launcher == "tf-config"], fast={"generic"})
)
def test_a_node_is_given_its_place_among_the_workers(job_of, name):
    job = job_of(name, "tf-config")
    assert job.ending == ("COMPLETED", "0:0"), job.log
    configs = [json.loads(line) for line in job.log.splitlines() if line.startswith("{")]
    port = 10_000 + int(job.state["JobId"])
    workers = [f"{hostname(name)}00{number}:{port}" for number in (1, 2)]
    assert sorted(configs, key=lambda config: config["task"]["index"]) == [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in (0, 1)
    ]


@pytest.fixture(scope="module")
def generic(site):
    return site("generic")


@pytest.fixture(scope="module")
def warned(generic) -> Callable[[str], Job]:
    """warned("srun"): the end of a job that was warned of its time limit as soon as it trained."""

    @once
    def of(launcher: str) -> Job:
        options = Options(nodes=2, gpus_per_node=1, launcher=launcher)
        folder = generic.folder / launcher  # in one folder a run of the same recipe would continue the other's
        folder.mkdir()
        script = folder / "job.sh"
        script.write_text(render(SITES["generic"], options, [*LINEAR, "--epochs", "300"]))
        number = submit(generic, script, folder)
        metrics = folder / "runs" / "linear" / number / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and '"step"' in metrics.read_text())
        generic("scancel", "--signal=USR2", number)  # to every rank, as --signal=USR2@120 does
        generic.once(number, lambda job: job["Restarts"] == "1")
        return over(generic, number)

    return of


@pytest.mark.parametrize("launcher", marked(["srun", "torchrun"], slow={"torchrun"}))
def test_a_job_that_is_warned_of_its_time_limit_comes_back_and_ends(warned, launcher):
    job = warned(launcher)
    number = job.state["JobId"]
    assert (*job.ending, job.state["Restarts"]) == ("COMPLETED", "0:0", "1"), job.log
    stopped = int(re.search(r"SIGUSR2: stopped after step (\d+), with a checkpoint", job.log)[1])
    assert 0 < stopped < 3000
    story = [
        f"2 ranks, {launcher}, horovod on cpu",
        f"stopped after step {stopped}, with a checkpoint; the same command continues from it.\n",
        f"job {number} is queued again.\n",
        f"resuming from step {stopped} of runs/linear/{number};",
        f"finished at step 3000; everything is in runs/linear/{number}\n",
    ]
    assert [line for line in story if line not in job.log] == [], job.log
    assert sorted(story, key=job.log.index) == story  # one log, which the second launch continues
    steps = [step for step, _ in losses(job.run)]
    assert steps == sorted({*range(10, 3001, 10), stopped})


@pytest.mark.slow
def test_wherever_a_job_was_stopped_it_ends_alike(warned):
    srun, torchrun = (losses(warned(launcher).run) for launcher in ("srun", "torchrun"))
    assert srun[-100:] == torchrun[-100:]


def test_submit_gives_the_script_to_slurm(generic):
    ours = ("--site", "generic", "--nodes", 2, "--submit", "--", "hostname")
    number = generic("exec", "head", "python", "-m", "hvdtrain", "slurm", *ours).strip()
    job = over(generic, number)
    assert job.ending == ("COMPLETED", "0:0"), job.log
    assert sorted(job.log.split()) == ["nid001"] * 4 + ["nid002"] * 4


def test_submit_reports_in_one_line_what_slurm_refuses(generic):
    ours = ("--site", "generic", "--partition", "booster", "--submit", "--", "hostname")
    done: Ended = generic.run("exec", "head", "python", "-m", "hvdtrain", "slurm", *ours)
    assert (done.code, done.err) == (
        2,
        "JobError: sbatch refused the script: error: invalid partition specified: booster; error: Batch job submission "
        "failed: Invalid partition name specified; change the flag it names.\n",
    )


SHOW = """\
import json, os, sys
from hvdtrain.launch.topology import discover
topology = discover(os.environ)
print(json.dumps([topology.rank, topology.size, sys.argv[1], os.environ["SLURM_CPUS_ON_NODE"]]))
"""
GOOD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:2
#SBATCH --ntasks-per-node=2
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun --exact bash -c 'exec python show.py $SLURM_PROCID'
"""
# What is replaced in GOOD, by what, --check's message, and what every task then prints: its rank, the number of ranks,
# $SLURM_PROCID, and the CPUs that its step has on its node.
PROVEN = {
    "right": ("", "", "", [[rank, 4, str(rank), "16"] for rank in range(4)]),
    "a training without srun": (
        "srun --exact bash -c 'exec python show.py $SLURM_PROCID'",
        "python show.py 0",
        "python without srun",
        [[0, 1, "0", "16"]],
    ),
    "an option after the first command": (
        "#SBATCH --ntasks-per-node=2\n",
        "module load Python\n#SBATCH --ntasks-per-node=2\n",
        "#SBATCH after the first command",
        [[rank, 2, str(rank), "8"] for rank in range(2)],
    ),
    "an option that is a comment": (
        "#SBATCH --ntasks-per-node",
        "# SBATCH --ntasks-per-node",
        "'# SBATCH' is not #SBATCH",
        [[rank, 2, str(rank), "8"] for rank in range(2)],
    ),
    "a rank in double quotes": (
        "'exec python show.py $SLURM_PROCID'",
        '"exec python show.py $SLURM_PROCID"',
        "$SLURM_PROCID is filled in by the job's shell",
        [[rank, 4, "0", "16"] for rank in range(4)],
    ),
    "CPUs that srun is not given": (
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"\n',
        "",
        "SRUN_CPUS_PER_TASK is not set",
        [[rank, 4, str(rank), "2"] for rank in range(4)],
    ),
}


def test_what_is_called_right_goes_right_and_what_is_called_wrong_goes_wrong(generic):
    (generic.folder / "show.py").write_text(SHOW)
    assert check_script(GOOD) == []
    numbers = {}
    for case, (old, new, wrong, _) in PROVEN.items():
        script = generic.folder / f"{case}.sh"
        script.write_text(GOOD.replace(old, new))
        assert not wrong or wrong in {finding.wrong for finding in check_script(GOOD.replace(old, new))}
        numbers[case] = submit(generic, script)
    for case, number in numbers.items():
        lines = [line for line in over(generic, number).log.splitlines() if line[0] == "["]
        assert sorted(map(json.loads, lines)) == PROVEN[case][-1], case


REFUSED = {  # what is replaced in GOOD, by what, --check's message, and sbatch's
    "Windows line ends": ("\n", "\r\n", "Windows line ends", "Batch script contains DOS line breaks"),
    "no shell": ("#!/bin/bash\n", "", "no #! line", "This does not look like a batch script."),
    "nodes": ("--nodes=2", "--nodes=two", "--nodes=two", '"two" is not a valid node count'),
    "time": ("--gres=gpu:2", "--gres=gpu:2 --time=2h", "--time=2h", "Invalid --time specification"),
    "memory": ("--gres=gpu:2", "--gres=gpu:2 --mem=1.5T", "--mem=1.5T", "Invalid --mem specification"),
}


@pytest.mark.parametrize(("old", "new", "wrong", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_called_wrong_slurm_refuses(generic, old, new, wrong, message):
    bad = GOOD.replace(old, new)
    assert wrong in {finding.wrong for finding in check_script(bad)}
    script = generic.folder / "refused.sh"
    script.write_bytes(bad.encode())
    done = generic.run("sbatch", script)
    assert done.code != 0
    assert message in done.err


def test_more_cpus_than_a_node_has_wait_forever(generic):
    bad = GOOD.replace("--cpus-per-task=8", "--cpus-per-task=24")
    assert "2 tasks x 24 CPUs" in {finding.wrong for finding in check_script(bad, SITES["generic"])}
    script = generic.folder / "waits.sh"
    script.write_text(bad)
    number = submit(generic, script)
    generic.once(number, lambda job: job["Reason"] == "PartitionConfig")
    generic("scancel", number)
