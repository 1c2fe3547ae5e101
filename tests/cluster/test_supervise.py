"""A job outlives its nodes: what `python -m hvdtrain slurm` prints, on a SLURM that misses a silent node after minutes.

Most jobs run side by side; the ranks find none of SLURM's commands.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import minicluster
from marks import marked
from node_losses import LINEAR, Job, script, trains

from hvdtrain.launch import slurm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SLURM_MISSES_A_NODE = 300  # seconds
MPI = {"openmpi": "pmix", "mpich": "pmi2", "gloo": None}


def undisturbed(job):
    return job.submit(script(trains(), nodes=2, mpi="pmix")).ended()


def twice(job):
    job.submit(script(trains(), nodes=2, spare=2, mpi="pmix"), "--exclusive").trains()
    _, second, third, _ = job.nodes()
    job.trains_again(job.cut(second))
    job.trains_again(job.cut(third), 2)
    return job.ended("COMPLETING")


def fewer(job):
    job.submit(script(trains(), nodes=3, mpi="pmix"), "--exclusive").trains()
    job.trains_again(job.cut(job.nodes()[2]))
    return job.ended()


def torchrun(job):
    job.submit(script(trains()[3:], nodes=2, spare=1, launcher="torchrun"), "--exclusive").trains()
    job.trains_again(job.cut(job.nodes()[1]))
    return job.ended()


def cut_off(job):
    """The node of the job's script loses its link, for longer than ranks wait for one another."""
    job.submit(script(trains(), nodes=2, mpi="pmix"), "--exclusive").trains()
    first = job.nodes()[0]
    job.cluster("cut", first)
    before = job.steps()
    job.until(lambda: job.supervised, "waits")
    job.cluster("heal", first)
    job.trains_again(before)
    return job.ended()


def first(job):
    """The node of the job's script loses its power, and SLURM misses it, here at once and not after five minutes."""
    job.submit(script(trains(), nodes=2, mpi="pmix"), "--exclusive").trains()
    node = job.nodes()[0]
    job.cut(node)
    job.cluster("scontrol", "update", f"nodename={node}", "state=down", "reason=missed")
    job.until(lambda: "resuming from step" in job.log, "trains again")
    assert node not in job.nodes()
    return job.ended()


def killed(build):
    def scenario(job):
        job.submit(script(trains(build), nodes=2, mpi=MPI[build])).trains()
        job.trains_again(job.kill_rank(1))
        return job.ended()

    return scenario


def no_progress(job):
    never = (*LINEAR, "--checkpoint-every-steps", 100_000, "--epochs", 100_000, "--checkpoint-every-epochs", 100_000)
    job.submit(script(trains("gloo", recipe=never), nodes=2))
    for start in (1, 2, 3):
        job.until(lambda start=start: job.log.count("Epoch: 1, Step: 9") == start, "trains")
        job.kill_rank(start % 2)
    return job.ended()


def array(job):
    """Of three elements the second loses a node, and may have no fewer ranks: its batch is given per rank."""
    recipe = ("linear", "--batch-size-per-rank", 50, "--epochs", 80, "--log-every-steps", 1, "--output")
    text = script(trains(recipe=recipe), nodes=2, mpi="pmix").rstrip() + ' "run-$SLURM_ARRAY_TASK_ID"\n'
    job.submit(text, "--array=1-3", "--exclusive", "--output=%a.out")
    element = Job(job.cluster, job.folder, f"{job.number}_2")
    job.until(lambda: all((job.folder / f"{n}.out").exists() for n in (1, 2, 3)), "elements")
    job.until(lambda: "Epoch: 2, " in (job.folder / "2.out").read_text(), "trains")
    element.cut(element.nodes()[1])
    job.until(lambda: "is queued again" in job.log, "queued again")
    job.state = {n: job.cluster.job(f"{job.number}_{n}") for n in (1, 2, 3)}
    job.cluster("scancel", job.number)
    return job


def diverged(job):
    return job.submit(script(trains("gloo", recipe=(*LINEAR, "--base-lr", 1e30)), nodes=2)).ended()


def bad_input(job):
    return job.submit(script(trains("gloo", recipe=("linear", "--batch-size", 5000)), nodes=2)).ended()


def cancelled(job):
    job.submit(script(trains("gloo", recipe=(*LINEAR, "--epochs", 100_000)), nodes=2)).trains()
    job.cluster("scancel", job.number)
    return job.ended()


SCENARIOS = {
    "undisturbed": undisturbed,
    "twice": twice,
    "fewer": fewer,
    "torchrun": torchrun,
    "cut off": cut_off,
    "first": first,
    **{build: killed(build) for build in MPI},
    "no progress": no_progress,
    "array": array,
    "diverged": diverged,
    "bad input": bad_input,
    "cancelled": cancelled,
}


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """By name a job that is over, or the error that its scenario ended with: of the tests that are to run."""
    folder = tmp_path_factory.mktemp("supervise")
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    slow = {item.callspec.params["name"] for item in here if item.get_closest_marker("slow")}
    others = {"undisturbed", *(item.callspec.params["name"] for item in here)} - slow
    with (
        minicluster(folder, "--nodes", 20, "--slurmd-timeout", SLURM_MISSES_A_NODE, "--kill-wait", 30) as cluster,
        ThreadPoolExecutor(len(SCENARIOS)) as pool,
    ):
        done = {}
        # The slow ones afterwards: all at once share two processors.
        for names in (others, slow):
            under_way = {}
            for name in filter(names.__contains__, SCENARIOS):
                under_way[name] = pool.submit(SCENARIOS[name], Job(cluster, folder / name.replace(" ", "-")))
                time.sleep(1)  # two processors start them one after the other anyway
            for name, job in under_way.items():
                try:
                    done[name] = job.result()
                except (Exception, pytest.fail.Exception) as error:
                    done[name] = error
        yield done


def of(jobs, name):
    if isinstance(jobs[name], BaseException):
        raise jobs[name]
    return jobs[name]


@pytest.mark.parametrize(
    ("name", "nodes", "count"),
    marked([("twice", 2, 2), ("fewer", 2, 1), ("torchrun", 2, 1)], slow={"twice", "torchrun"}),
)
def test_a_node_without_power_does_not_end_the_job(jobs, name, nodes, count):
    job = of(jobs, name)
    assert job.state["ExitCode"] == "0:0"
    assert "finished at step 400" in job.log, job.log[-3000:]
    assert len(job.supervised) == count
    assert all(line.startswith("no heartbeat from rank") for line in job.supervised)
    assert all(f"; starts again on {nodes} nodes without nid0" in line for line in job.supervised)
    # The job has no silent node any more, with which SLURM would end it. (Without accounting, SLURM lets a job be made
    # smaller only once.)
    assert job.supervised[0].split("without ")[1][:6] not in slurm.hosts(job.state["NodeList"])
    assert not list(job.folder.glob(".hvdtrain-*"))


@pytest.mark.parametrize("name", marked(MPI, fast={"openmpi"}))
def test_a_killed_rank_starts_again_on_the_same_nodes(jobs, name):
    job = of(jobs, name)
    assert job.state["JobState"] == "COMPLETED", job.log[-3000:]
    (line,) = job.supervised
    assert "ended without a message: killed, out of memory, or crashed; starts again on 2 nodes, from step" in line


@pytest.mark.parametrize("name", ["cut off"])
def test_a_script_that_is_cut_off_waits_and_starts_again_on_the_same_nodes(jobs, name):
    job = of(jobs, name)
    assert job.state["JobState"] == "COMPLETED", job.log[-3000:]
    waits, again = job.supervised
    assert waits == "neither another node nor slurmctld answers: this node is cut off, and waits until one does"
    assert "; starts again on 2 nodes, from step" in again


@pytest.mark.parametrize("name", ["first"])
def test_slurm_queues_a_job_again_whose_script_has_lost_its_node(jobs, name):
    job = of(jobs, name)
    assert (job.state["JobState"], job.state["Restarts"]) == ("COMPLETED", "1"), job.log[-3000:]


@pytest.mark.parametrize(
    "name", marked(["twice", "torchrun", "cut off", "first", *MPI], slow={"twice", "torchrun", "mpich", "gloo"})
)
def test_the_losses_are_those_of_the_undisturbed_run_to_the_bit(jobs, name):
    assert of(jobs, name).losses() == of(jobs, "undisturbed").losses()


@pytest.mark.parametrize("name", ["array"])
def test_an_element_of_an_array_is_queued_again_alone_and_elsewhere(jobs, name):
    job = of(jobs, name)
    lost, queued = job.supervised
    assert lost.endswith("; 1 of 2 nodes remain, on which it cannot continue")
    assert queued.startswith(f"job {job.number}_2 is queued again, without nid0")
    assert [job.state[n]["Restarts"] for n in (1, 2, 3)] == ["0", "1", "0"]
    assert job.state[2]["ExcNodeList"] == queued.rstrip(".").rpartition(" ")[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no progress"])
def test_three_starts_without_a_checkpoint_end_the_job(jobs, name):
    job = of(jobs, name)
    assert job.state["JobState"] == "FAILED"
    assert len(job.supervised) == 3
    assert job.supervised[-1].endswith("; 3 starts in a row ended without a new checkpoint, so the job ends")


@pytest.mark.parametrize(
    ("name", "state", "said"),
    marked(
        [
            ("diverged", ("FAILED", "1:0", "0"), "DivergedError"),
            ("bad input", ("FAILED", "2:0", "0"), "PlanError"),
            ("cancelled", ("CANCELLED", "0:15", "0"), "SIGTERM"),
        ],
        slow={"diverged", "bad input"},  # tests/tools/supervise/test_decision.py shows both
    ),
)
def test_what_is_never_started_again(jobs, name, state, said):
    job = of(jobs, name)
    assert said in job.log
    assert job.supervised == []
    assert (job.state["JobState"], job.state["ExitCode"], job.state["Restarts"]) == state
