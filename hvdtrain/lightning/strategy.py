"""`Trainer(strategy="horovod")`, which Lightning dropped at 2.0, for any module."""

import contextlib
import os
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from hvdtrain.core.recipe import of_program
from hvdtrain.errors import RecipeError
from hvdtrain.launch import mpi
from hvdtrain.launch.devices import gpu_index
from hvdtrain.lightning.environment import OneDevice
from hvdtrain.ranks import agreement
from hvdtrain.ranks.stacks import is_operation
from hvdtrain.run.session import FitSession
from hvdtrain.torch.averaging import Averager
from hvdtrain.torch.engines.horovod import COMPRESSIONS, HorovodEngine, hvd
from hvdtrain.torch.user_loop.gather import rows

# Validation runs in inference mode, whose tensors Horovod's thread may not write. Tensors for Horovod are made outside.
outside_inference = torch.inference_mode(False)
OPERATIONS = {"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}


class HorovodStrategy(OneDevice, ParallelStrategy):
    """One process for each device, joined by Horovod; started by horovodrun, mpirun or srun, or alone.

    Training begins with rank 0's weights, buffers and optimizer states. Gradients are averaged while backward runs,
    before they are unscaled and clipped. With accumulation only the last micro-batch's backward communicates. Metrics
    of torchmetrics are added over the ranks. The learning rate is not changed.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=hl.HorovodStrategy(compression="fp16"), accelerator="cpu", logger=False)
        >>> trainer.world_size  # with one process
        1
    """

    strategy_name = engine = "horovod"

    def __init__(self, compression: str = "none", **settings: Any) -> None:
        """`compression` of the communicated gradients: none, fp16 or fp64 (whose sums depend on no order of ranks).
        Other settings are those of Lightning's ParallelStrategy."""
        if compression not in COMPRESSIONS:
            raise RecipeError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}.")
        super().__init__(**settings)
        self.compression, self.num_nodes = compression, 1

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives each rank a part of a data loader that has no sampler of its own."""
        return True

    def set_world_ranks(self) -> None:
        """Lightning calls it once it has set devices and nodes. Raises DeviceError where they do not fit the ranks."""
        self.environment.validate_settings(len(self.parallel_devices or [None]), self.num_nodes)
        printing: Any = rank_zero_only
        printing.rank = self.global_rank

    def start_library(self) -> None:
        """Joins the ranks. Raises WorldError where Horovod reports other ranks than the launcher has started."""
        topology, session = self.environment.topology, FitSession[Any](".", (None, None), of_program(), insecure=False)
        is_joined = topology.size == 1 or hvd.is_initialized() or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
        needs_rendezvous = not is_joined and mpi.uses_gloo(topology, "torch", os.environ)
        if needs_rendezvous:  # which FaultTolerance would have made
            session.join("torch", self.engine)
        self.library = HorovodEngine(of_program(), None)
        if needs_rendezvous:
            session.left()
        self.library.device = self.root_device
        agreement.check_world(topology, hvd.rank(), hvd.size())
        if self.root_device.type == "cuda":
            visible = len(self.parallel_devices or [])
            gpu_index("cuda", visible, topology, self.library.gpu_operations)
        reset_seed()

    def setup(self, trainer: Any) -> None:
        """Puts module and optimizers on the device, and gives all ranks rank 0's module."""
        if self._layer_sync:
            raise RecipeError("sync_batchnorm goes with strategy ddp: PyTorch's own needs it; drop it, or take ddp.")
        super().setup(trainer)
        shapes = {name: f"{each.dtype} {list(each.shape)}" for name, each in self._tensors.items()}
        self.agree(agreement.named("model", shapes))
        self.library.broadcast(self._tensors, None)

    def on_train_start(self) -> None:
        """Gives all ranks rank 0's state: maybe only rank 0 has read a checkpoint."""
        self.library.broadcast(self._tensors, None)
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            if self.broadcast(bool(state["state"])):
                optimizer.load_state_dict(self.broadcast(move_data_to_device(state, torch.device("cpu"))))
        self.agree_to_train()
        if self.world_size > 1:
            self._averager = Averager(self._whole, self.library, self.compression)

    @property
    def learning(self) -> tuple[bool, ...]:
        """Which parameters learn; see `hvdtrain.run.trainer.Replica`."""
        return self._averager.parameters.learning if self._averager else ()

    def end_batch(self) -> None:
        """Called after each batch on several ranks. Raises LoopError where one rank alone has made no backward."""
        assert self._averager
        self.backwards += self._averager.backwards  # also those without manual_backward
        if not (self.backwards or self.accumulates):
            self._averager.absent()
        self._averager.updated()
        self._averager.evidence.watch(
            False
        )  # else it would keep the gradients, and Lightning's steps begin with backward

    @outside_inference
    def on_validation_start(self) -> None:
        """Gives all ranks rank 0's BatchNorm statistics, those in a checkpoint: each rank's are of its own examples."""
        self.library.broadcast(dict(self._whole.named_buffers()), None)

    on_test_start = on_predict_start = on_validation_start

    def block_backward_sync(self) -> Any:
        """A context in which gradients add up on each rank without communication."""
        return self._averager.pause() if self._averager else contextlib.nullcontext()

    def model_to_device(self) -> None:
        self._whole.to(self.root_device)

    @is_operation
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if hvd.is_initialized():
            hvd.barrier()

    @outside_inference
    @is_operation
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s picklable object, on every rank."""
        return hvd.broadcast_object(obj, src, name="hvdtrain.broadcast") if hvd.is_initialized() else obj

    @outside_inference
    @is_operation
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The tensor's mean, sum, maximum or minimum over the ranks. The mean of integers is a float64."""
        if not isinstance(tensor, Tensor):
            return tensor
        operation = OPERATIONS[str(reduce_op or "sum").rpartition(".")[2].lower()]
        if operation == hvd.Average and not tensor.is_floating_point():
            tensor = tensor.double()
        return hvd.allreduce(tensor.clone(memory_format=torch.contiguous_format), op=operation, name="hvdtrain.reduce")

    @outside_inference
    @is_operation
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The ranks' tensors, all of one shape, as [size, *shape]. With `sync_grads` gradients flow back to each."""
        self.agree_on(tensor)
        return rows(tensor if sync_grads else tensor.detach(), self.library)

    def teardown(self) -> None:
        if self._averager:
            self._averager.close()
            self._averager = None
        super().teardown()

    @property
    def _whole(self) -> Any:
        """The user's module, which is there whenever Lightning calls a strategy."""
        return self.lightning_module

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """The module's tensors by name, also those that its state_dict leaves out."""
        kept = {name: each for name, each in self._whole.state_dict().items() if isinstance(each, Tensor)}
        return {**kept, **dict(self._whole.named_parameters()), **dict(self._whole.named_buffers())}
