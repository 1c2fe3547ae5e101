"""A rank as Lightning sees it: the environment of ranks, the part that both strategies share, and the one for DDP."""

import functools
import os
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from hvdtrain.core.recipe import of_program
from hvdtrain.errors import DeviceError, LoopError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.lightning import metrics, private
from hvdtrain.lightning.decisions import Decisions, name_no_mean, no_mean, refuse
from hvdtrain.lightning.fault_tolerance import FaultTolerance
from hvdtrain.ranks import agreement, timeouts
from hvdtrain.ranks.stacks import is_operation
from hvdtrain.run.loop import Communicator
from hvdtrain.torch import resumable
from hvdtrain.torch.averaging import Averager, Counts
from hvdtrain.torch.engines import Engine, process_settings
from hvdtrain.torch.engines.evidence import drawn
from hvdtrain.torch.state import numbers

NO_LOSS = "a rank that has nothing to learn from gives (loss * 0) to return or manual_backward, as all ranks average"
UNUSED = "give hl.RankDDPStrategy(find_unused_parameters=True), or freeze what no loss reaches"


class RankEnvironment(TorchElasticEnvironment):
    """The ranks of any launcher that hvdtrain knows: horovodrun, mpirun, torchrun, mpiexec, an srun step, or none.

    Lightning's own environments read SLURM's variables first, even below an mpirun that has set others.

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
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR") or self._rendezvous().host

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT") or self._rendezvous().ports[-1])

    @staticmethod
    def detect() -> bool:
        return not discover(os.environ).is_alone

    def world_size(self) -> int:
        return self.topology.size

    def global_rank(self) -> int:
        return self.topology.rank

    def local_rank(self) -> int:
        return self.topology.local_rank

    def node_rank(self) -> int:
        return self.topology.node or 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises DeviceError where the Trainer's devices and nodes are not those of the launch."""
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
    """One device for each rank, for any number of ranks on each host; and the comparisons that both strategies make."""

    engine: str
    """The name of hvdtrain's engine for the same collective library."""
    library: Engine
    """The collective library, once it has started."""
    counts: Counts | None = None
    """The counts of examples or tokens, where the module calls `mean_loss`."""
    seen: tuple[torch.Tensor, Any] | None = None
    """The sum and the count that `mean_loss` got for the last micro-batch."""
    mean: torch.Tensor | None = None
    """The result of `mean_loss` for one of several micro-batches, until its backward."""
    backwards = _batch = 0
    """How many backwards this rank has made in this batch."""
    is_watched = True
    """Whether replicas are compared after this batch."""
    _drawn: Any = None
    """The states of the random number generators after the last backward of a batch that is watched."""
    _averager: Averager | None = None
    _is_compared = _is_watched = False
    _of_halves: Any = ()

    def __init__(self, *, sample_check: Literal["on", "off"] = "on", **settings: Any) -> None:
        """Settings as Lightning's strategy takes them. `sample_check` off compares no labels of data loaders."""
        self.environment = settings.get("cluster_environment") or RankEnvironment()
        self._sample_check = sample_check
        super().__init__(**{**settings, "cluster_environment": self.environment})

    def setup_environment(self) -> None:
        """Starts the collective library. With FaultTolerance, `fit` joins the failure detector before."""
        trainer: Any = self.lightning_module._trainer if self.lightning_module else None
        fits = trainer and trainer.state.fn == TrainerFn.FITTING
        is_whole = fits and not trainer.fast_dev_run
        tolerant = [each for each in trainer.callbacks if isinstance(each, FaultTolerance)] if is_whole else []
        for callback in tolerant:
            callback.join_ranks(self.engine)
        self.start_library()
        super().setup_environment()
        metrics.synchronize(self)
        if fits and self.world_size > 1:
            refuse(trainer.callbacks, f"training on {self.world_size} ranks")
            others = [each for each in trainer.callbacks if not isinstance(each, Decisions)]
            checks = [self._sample_check, *(each.sample_check for each in tolerant)]
            how = "off" if "off" in checks else self._sample_check
            trainer.callbacks = [Decisions(self.among, how, compares=not tolerant), *others]

    def start_library(self) -> None:
        """Starts the collective library, where Lightning does not."""

    @property
    def among(self) -> Communicator:
        return (self.global_rank, self.world_size), discover(os.environ).host, self.library.sum

    def agree(self, values: agreement.Values) -> None:
        """Raises AgreementError where another rank has other values."""
        agreement.check_values(values, *self.among)

    def agree_on(self, tensor: torch.Tensor) -> None:
        """Raises AgreementError where ranks gather other shapes; not in training, where batches are of one size."""
        if (module := self.lightning_module) and not module.trainer.training:
            self.agree({"gathered: tensor": f"{tensor.dtype} {list(tensor.shape)}"})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.backwards, self._batch, self._drawn = 0, batch_idx, None

    @property
    def cause(self) -> str:
        """Why replicas part in this batch, as a key of `hvdtrain.ranks.agreement.REMEDIES`."""
        if self.backwards:
            return "numbers" if self._drawn is not None and self._drawn != drawn() else "weights"
        return "gradients"

    @property
    def accumulates(self) -> bool:
        """Whether this batch makes no update, so that its gradients are not averaged."""
        return private.accumulates(self.lightning_module.trainer)  # type: ignore[union-attr]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's step. Raises LoopError where this rank has no loss."""
        if not self._is_watched and self.world_size > 1:
            self._of_halves = no_mean(self.lightning_module, *args)  # type: ignore[arg-type]
        output = super().training_step(*args, **kwargs)
        if output is None and self.world_size > 1 and self.lightning_module.automatic_optimization:  # type: ignore[union-attr]
            if self._averager and not self.accumulates:
                self._averager.absent()  # then the others do not wait for it
            raise self.of_this_rank("returned None from training_step", NO_LOSS)
        return output

    def of_this_rank(self, what: str, remedy: str) -> LoopError:
        """An error that this rank alone has."""
        error = LoopError(f"rank {self.global_rank} {what} in batch {self._batch} of the epoch: {remedy}.")
        error.everywhere = False
        return error

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """In the first step names what in the loss is no mean over examples. Raises LoopError where the loss adds
        something to `mean_loss`, as all gradients are divided by counts."""
        super().pre_backward(closure_loss)
        if not self._is_watched and self.world_size > 1:
            self._is_watched = True
            name_no_mean(self.lightning_module, closure_loss, () if self.counts else self._of_halves)
        mean, self.mean = self.mean, None
        if mean is None or self._is_compared:
            return
        self._is_compared = True
        accumulated = self.lightning_module.trainer.accumulate_grad_batches  # type: ignore[union-attr]
        if not torch.isclose(closure_loss.detach() * accumulated, mean, rtol=1e-4):
            raise LoopError(
                f"training_step adds something to hl.mean_loss, which accumulate_grad_batches={accumulated} would "
                "divide by counts, too; add it to its total, times the count, or do not accumulate."
            )

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """After an update's last micro-batch, divides the ranks' added gradients by their added counts."""
        super().post_backward(closure_loss)
        self.backwards += 1
        self._drawn = drawn() if self.is_watched else None
        if self.counts and not self.accumulates:
            self.counts.finish(self.lightning_module.parameters())  # type: ignore[union-attr]

    def agree_to_train(self) -> None:
        """Raises AgreementError where the ranks differ in batches, epochs, optimizers, code or settings."""
        if self.world_size == 1:
            return
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        if resumable.parameters(self.optimizers) - set(self.lightning_module.parameters()):  # type: ignore[union-attr]
            raise LoopError(
                "an optimizer updates parameters that are not the module's, whose gradients the ranks do not average; "
                "make what has them an attribute of the LightningModule."
            )
        if any(group.get("line_search_fn") for group in resumable.groups(self.optimizers)):
            raise LoopError(
                "an optimizer with line_search_fn steps by each rank's own loss, so the ranks would part; leave it out."
            )
        fit = {"batches an epoch": str(trainer.num_training_batches), "epochs": trainer.max_epochs}
        fit |= {"accumulate_grad_batches": trainer.accumulate_grad_batches, "max_steps": trainer.max_steps}
        fit |= {"validates": sum(trainer.num_val_batches) > 0}
        process = agreement.of_process(process_settings(), self.global_rank, self.library.sum)
        self.agree(process | agreement.named("training", {**fit, **numbers(self.optimizers)}))

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank if len(devices) > 1 else 0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


def mean_loss(module: LightningModule, total: torch.Tensor, count: Any) -> torch.Tensor:
    """A loss that is a mean over tokens, pixels or weights rather than examples, for `training_step` to return. Its
    gradients are those of the sum of all totals, over ranks and micro-batches, divided by the sum of all counts.

    `total` is the sum over this rank's micro-batch, `count` a number or a tensor of one element. Every rank calls it in
    every training step, with accumulate_grad_batches exactly once. Outside of training it is total / count, 0 where the
    count is 0. Raises LoopError.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> def training_step(self, batch, batch_idx):
        ...     tokens, labels = batch
        ...     total = F.cross_entropy(self.model(tokens), labels, ignore_index=-100, reduction="sum")
        ...     return hl.mean_loss(self, total, (labels != -100).sum())
    """
    trainer, strategy = module.trainer, cast(Any, module.trainer.strategy)
    accumulated = trainer.accumulate_grad_batches if module.automatic_optimization else 1
    is_ours = isinstance(strategy, OneDevice)
    if not trainer.training or (not is_ours and trainer.world_size == accumulated == 1):
        return total / (count + (count == 0))
    if not is_ours:
        raise LoopError(
            f"hl.mean_loss on several ranks or with accumulate_grad_batches needs strategy='horovod' or "
            f"hl.RankDDPStrategy(), got {type(strategy).__name__}."
        )
    strategy.counts, strategy.seen = strategy.counts or Counts(strategy.library), (total.detach(), count)
    if accumulated == 1:
        return cast(torch.Tensor, strategy.counts.mean(total, count))
    if strategy.mean is not None:
        raise LoopError(
            f"hl.mean_loss was called twice in a training_step, whose gradients accumulate_grad_batches={accumulated} "
            "would divide by one count; call it once, or do not accumulate."
        )
    loss = strategy.counts.divided(total, count, accumulated)  # Lightning divides it by the number of micro-batches
    strategy.mean = loss.detach()
    return loss


class RankDDPStrategy(OneDevice, DDPStrategy):
    """DDP over the ranks of the launcher, also where hosts have unequal numbers of ranks.

    Validation bypasses DistributedDataParallel, which would broadcast buffers in every batch. So ranks may have unequal
    numbers of batches, and no example is read twice.

    Examples:
        >>> import hvdtrain.lightning as hl
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=hl.RankDDPStrategy(), accelerator="cpu", logger=False)
    """

    strategy_name = "rank_ddp"
    engine = "ddp"
    _grouped = 0
    """The number of parameters in all groups of the optimizers."""

    def __init__(self, **settings: Any) -> None:
        """Settings as DDPStrategy's."""
        super().__init__(**settings)
        self._forward_redirection = _OnlyTraining()

    def on_train_start(self) -> None:
        self.agree_to_train()

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._parameters = [*self.model.parameters()]  # type: ignore[union-attr]
        self._wrapped = self.learning

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Makes DistributedDataParallel anew where it was made for other parameters than those that learn now."""
        super().on_train_batch_start(batch, batch_idx)
        module, settings = cast(LightningModule, self.lightning_module), self._ddp_kwargs
        if self._grouped != (grouped := sum(len(group["params"]) for group in resumable.groups(self.optimizers))):
            self._grouped, self._parameters = grouped, [*module.parameters()]  # there may be new ones
        if self._is_of_others:
            named = {
                "learning: parameters that learn": [n for n, each in module.named_parameters() if each.requires_grad]
            }
            self._agree_soon(named, "trains other parameters", agreement.REMEDIES["learning"])
            self.model, self._pl_static_graph_delay_done = module, False
            self._ddp_kwargs = {**settings, "init_sync": False}  # which would give rank 0's buffers to all
            self.configure_ddp()
            self._ddp_kwargs = settings

    @property
    def learning(self) -> frozenset[torch.nn.Parameter]:
        """Which parameters learn; see `hvdtrain.run.trainer.Replica`."""
        return frozenset([each for each in self._parameters if each.requires_grad])

    @property
    def _is_of_others(self) -> bool:
        """Whether DistributedDataParallel was made for other parameters than those that learn."""
        more = () if self._ddp_kwargs.get("find_unused_parameters") else self._wrapped - self.learning
        return bool(self.learning and (more or self.learning - self._wrapped))

    @property
    def cause(self) -> str:
        return "learning" if self._is_of_others else super().cause

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Raises LoopError where backward has left out a parameter: then DistributedDataParallel has averaged none."""
        super().post_backward(closure_loss)
        takes_any = any(map(self._ddp_kwargs.get, ("find_unused_parameters", "static_graph")))
        model: Any = self.model
        if takes_any or not model.require_backward_grad_sync or all(p.grad is not None for p in self.learning):
            return
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        if names := [n for n, p in named if p.requires_grad and p.grad is None and n not in ignored]:
            raise self.of_this_rank(f"has no gradient of {len(names)} parameters ({', '.join(names[:8])})", UNUSED)

    def end_batch(self) -> None:
        """Called after each batch on several ranks. Raises LoopError where one rank alone has made no backward."""
        if not (self.backwards or self.accumulates):
            self._agree_soon({}, "made no backward", NO_LOSS)

    def _agree_soon(self, values: agreement.Values, what: str, remedy: str) -> None:
        """As `agree`, but raises LoopError where the others do not come, as they wait in an average of gradients."""
        ranks, host, _ = self.among
        try:
            agreement.check_values(values, ranks, host, functools.partial(self.library.sum, seconds=timeouts.ARRIVAL))  # type: ignore[call-arg]
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            raise self.of_this_rank(
                f"{what}, and no other rank within {timeouts.ARRIVAL:.0f} seconds", remedy
            ) from None

    @functools.cached_property
    def library(self) -> Engine:  # type: ignore[override]
        from hvdtrain.torch.engines.ddp import DdpEngine  # which needs torch.distributed

        return DdpEngine(of_program(), self.environment.topology, self.root_device)

    @is_operation
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's, but the mean of integers is a float64, and not rounded down."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in {"mean", "avg"}:
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if group in {None, torch.distributed.group.WORLD}:
            self.agree_on(tensor)
        return super().all_gather(tensor, group, sync_grads)

    def on_validation_start(self) -> None:
        """Gives all ranks rank 0's BatchNorm statistics, those in a checkpoint: each rank's are of its own examples."""
        private.sync_module_states(self.lightning_module)

    on_test_start = on_predict_start = on_validation_start


class _OnlyTraining(private.DDP_FORWARD):  # type: ignore[misc]
    """Calls the module's own method, and DistributedDataParallel in training alone."""

    def __call__(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        if method_name == "training_step":
            return super().__call__(wrapper_module, original_module, method_name, *args, **kwargs)
        return getattr(original_module, method_name)(*args, **kwargs)
