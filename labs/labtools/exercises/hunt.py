"""The checks of lab 10: each runs the learner's program on one rank and on two, and judges by what is measured."""

from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from labtools import hunt
from labtools.exercises import OnRanks, print_right
from labtools.exercises import hunt_mistakes as mistakes
from labtools.hunt import Found, Task

SEED = 7  # other data than those of the notebook's looks

Program = Callable[[Task], Any]


class Check(OnRanks):
    """The ten programs of lab 10."""

    lab = 10
    hints: ClassVar = {
        "program_1": (
            "how many examples does each rank read in an epoch, and how many are there?",
            "with two ranks each has to read half of them, another half than the other. DistributedSampler(set, "
            "number of ranks, this rank) gives a rank its own.",
            "the loader takes it as sampler=..., in place of shuffle; and sampler.set_epoch(epoch) begins an epoch.",
        ),
        "program_2": (
            "compare the first examples of two epochs.",
            "the sampler draws its order from a seed and the number of the epoch. Who tells it the number?",
        ),
        "program_3": (
            "are the ranks' weights the same at the end? Were they at the beginning?",
            "the seed is the rank's own, so the random weights are too. One rank's have to go to all.",
            "hvd.broadcast_parameters, of the model's state_dict, from rank 0, before the first update.",
        ),
        "program_4": (
            "which weights does the optimizer know? Those that the model had when it was made.",
            "the order matters: first the whole network, then what goes to all ranks, then the optimizer.",
        ),
        "program_5": (
            "the ranks' weights are not the same, though DDP is there. When does DDP average?",
            "DDP's forward prepares the averaging, and it is called by calling DDP's model, not the network within it.",
        ),
        "program_6": (
            "all ranks have the same gradient. What else does an update need?",
            "the scheduler decides on each rank, by a number. Is it the same number?",
            "hvd.allreduce(tensor) is the mean over the ranks; .item() makes a number of it.",
        ),
        "program_7": (
            "one rank and two disagree, and the ranks agree. By which number does each rank divide its losses?",
            "cross_entropy with reduction='sum' divides by nothing. The divisor is the number of labels on all ranks, "
            "and Horovod's mean over the ranks divides by two already.",
            "so divide the sum by the mean number of labels of a rank: hvd.allreduce of this rank's count.",
        ),
        "program_8": (
            "what is added to the first input on rank 0, and on rank 1?",
            "the weights want one seed on all ranks, the noise another on each. When may the seed change?",
        ),
        "program_9": (
            "how many examples were validated, on one rank and on two, all ranks together?",
            "DistributedSampler gives each rank as many examples, and repeats some where that does not come out even. "
            "A loader takes any list of indices as its sampler.",
            "the indices of a rank: from its number on, every size-th, up to the end of the set.",
        ),
        "program_10": (
            "what does SGD with momentum keep, besides the weights?",
            "optimizer.state_dict() and load_state_dict: both have to be called, at both ends.",
        ),
    }

    def program_1(self, program_1: Program) -> None:
        self._hunt("program_1", program_1)
        print_right("each example is read by one rank in an epoch, and two ranks make as many updates as one.")

    def program_2(self, program_2: Program) -> None:
        self._hunt("program_2", program_2)
        print_right("each epoch has an order of its own, and the ranks still share the examples.")

    def program_3(self, program_3: Program) -> None:
        self._hunt("program_3", program_3)
        print_right("both ranks have the same weights, at the first update and at the end.")

    def program_4(self, program_4: Program) -> None:
        self._hunt("program_4", program_4)
        print_right("the new head is trained, and the same on both ranks.")

    def program_5(self, program_5: Program) -> None:
        self._hunt("program_5", program_5)
        print_right("both ranks have the same weights, and one rank alone has them too.")

    def program_6(self, program_6: Program) -> None:
        self._hunt("program_6", program_6)
        print_right("both ranks have the same weights, and one rank alone has them too.")

    def program_7(self, program_7: Program) -> None:
        self._hunt("program_7", program_7)
        print_right("two ranks end with the weights of one, with unequal numbers of labels.")

    def program_8(self, program_8: Program) -> None:
        self._hunt("program_8", program_8)
        print_right("each rank adds noise of its own, and the weights are the same.")

    def program_9(self, program_9: Program) -> None:
        self._hunt("program_9", program_9)
        print_right("each of the 21 examples counts once, on one rank and on two.")

    def program_10(self, program_10: Program) -> None:
        self._hunt("program_10", program_10)
        straight, paused = hunt.through_and_paused(lambda *given: self._measure("program_10", program_10, 2, *given))
        self._judge("program_10", mistakes.of_pause(straight, paused))
        print_right("a training with a pause ends with the weights of one without.")

    def _hunt(self, gap: str, program: Program) -> None:
        found = []
        for ranks in (1, 2):
            with TemporaryDirectory() as folder:
                found.append(self._measure(gap, program, ranks, hunt.EPOCHS, folder))
        self._judge(gap, mistakes.of_program(gap, *found))

    def _measure(self, gap: str, program: Program, ranks: int, epochs: int, folder: str) -> Sequence[Found]:
        return self._run(gap, hunt.measured, program, SEED, epochs, folder, ranks=ranks)
