"""Lightning's view of a rank: the same topology that every adapter reads."""

import os
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from hvdtrain.core.sharing import Sum
from hvdtrain.errors import DeviceError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.lightning.fault_tolerance import FaultTolerance
from hvdtrain.run import agreement
from hvdtrain.torch import devices
from hvdtrain.torch.state import numbers


class RankEnvironment(ClusterEnvironment):
    """The ranks of any launcher that hvdtrain knows: horovodrun, mpirun, torchrun, mpiexec, an srun step, or none.

    Lightning's own environments would read SLURM's first, also inside an mpirun that sets others.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> ranks = hl.RankEnvironment()
        >>> ranks.global_rank(), ranks.world_size()  # with one process
        (0, 1)
    """

    def __init__(self, topology: Topology | None = None) -> None:
        super().__init__()
        self.topology = topology or discover(os.environ)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR") or self._rendezvous().host

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT") or self._rendezvous().ports[-1])

    @staticmethod
    def detect() -> bool:
        return discover(os.environ).launcher != "alone"

    def world_size(self) -> int:
        return self.topology.size

    def global_rank(self) -> int:
        return self.topology.rank

    def local_rank(self) -> int:
        return self.topology.local_rank

    def node_rank(self) -> int:
        return self.topology.node or 0

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has set it."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has set it."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuses a Trainer that was promised other ranks than there are. Raises DeviceError."""
        size, local_size = self.topology.size, self.topology.local_size
        if num_devices not in {1, local_size} or (num_devices > 1 < num_nodes and num_devices * num_nodes != size):
            raise DeviceError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) must fit the {size} ranks, {local_size} of "
                f"them on {self.topology.host}, that {self.topology.launcher} started; leave both out, or give "
                f"devices={local_size}."
            )

    def _rendezvous(self) -> rendezvous.Rendezvous:
        found = rendezvous.from_launcher(self.topology, os.environ)
        return found or rendezvous.from_host_or_mpi(self.topology, os.environ)


class OneDevice(ParallelStrategy):
    """A rank's device and its sampler settings, whatever number of ranks each host has."""

    engine: str
    """What hvdtrain calls the collective library."""

    def setup_environment(self) -> None:
        """Starts the library; where the Trainer fits with FaultTolerance, that joins its failure detector before."""
        trainer: Any = self.lightning_module._trainer if self.lightning_module else None
        for callback in trainer.callbacks if trainer and trainer.state.fn == TrainerFn.FITTING else []:
            if isinstance(callback, FaultTolerance):
                callback.join_ranks(self.engine)
        self.start_library()
        super().setup_environment()

    def start_library(self) -> None:
        """What comes before Lightning's own part."""

    def agree(self, values: agreement.Values, sum_over_ranks: Sum) -> None:
        """Raises AgreementError where another rank has other values."""
        ranks = self.global_rank, self.world_size
        agreement.check(values, ranks, discover(os.environ).host, sum_over_ranks)

    def agree_to_train(self, sum_over_ranks: Sum) -> None:
        """Raises AgreementError where another rank trains otherwise: batches, epochs, optimizers, code, settings."""
        if self.world_size == 1:
            return
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        fit = {"batches an epoch": str(trainer.num_training_batches), "epochs": trainer.max_epochs}
        fit |= {"accumulate_grad_batches": trainer.accumulate_grad_batches, "max_steps": trainer.max_steps}
        process = agreement.of_process(devices.settings(), self.global_rank, sum_over_ranks)
        self.agree(process | agreement.named("training", {**fit, **numbers(self.optimizers)}), sum_over_ranks)

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank if len(devices) > 1 else 0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}
