"""What checkpoints hold of a Trainer: module, optimizers, schedulers, loss scale, Lightning's counters."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from torch.utils._pytree import tree_leaves

from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.errors import OTHER_FOLDER, CheckpointError, LoopError
from hvdtrain.lightning import private
from hvdtrain.lightning.data import GlobalBatches
from hvdtrain.lightning.decisions import NOT_RESUMED, REFUSED, monitored, refuse
from hvdtrain.run.attributes import Attributes
from hvdtrain.run.session import take_data
from hvdtrain.torch import codec, resumable
from hvdtrain.torch.models import curve_line
from hvdtrain.torch.objective import StepOutput
from hvdtrain.torch.state import State
from hvdtrain.torch.user_loop.kept import load_scheduler, of_scheduler
from hvdtrain.torch.user_loop.program import changed_settings, given_settings

ELSEWHERE = {"epoch", "global_step", "loops", "optimizer_states", "lr_schedulers", "MixedPrecision"}
"""The keys of Lightning's checkpoint that the run's checkpoint holds in its own way."""
HYPER_PARAMETERS = ("hparams_name", "hparams_type", "hyper_parameters")


ATTRIBUTES = "attributes of callbacks"


WITH_STATE = torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler


class TrainerKinds(codec.TorchKinds):
    """Also knows what is Lightning's own, and the state of modules and metrics beside the one that is trained."""

    def __init__(self, module: LightningModule, trainer: Trainer) -> None:
        super().__init__(trainer.strategy.root_device)
        self._trained, self._trainer = module, trainer

    def is_opaque(self, each: Any) -> bool:
        return isinstance(each, Trainer | LightningDataModule | Logger) or super().is_opaque(each)

    def state_of(self, each: Any) -> Any:
        if isinstance(each, WITH_STATE):
            schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
            if any(each is one for one in (*self._trainer.optimizers, *schedulers)):
                return None
            return each.state_dict(), getattr(each, "optimizer", None)
        if not isinstance(each, torch.nn.Module):
            return super().state_of(each)
        if any(each is one for one in self._trained.modules()) or getattr(each, "_trainer", None):
            return None
        return {name: _tensors(part) for name, part in each.named_modules()}

    def set_state(self, each: Any, state: Any, fill: Callable[[Any, Any], Any]) -> None:
        if isinstance(each, WITH_STATE):
            each.load_state_dict(state[0])
            fill(None, state[1])
            return
        if not isinstance(each, torch.nn.Module):
            super().set_state(each, state, fill)
            return
        for name, part in each.named_modules():
            now = _tensors(part)
            for key, value in state.get(name, {}).items():
                if (given := fill(now.get(key), value)) is not now.get(key):
                    setattr(part, key, given)


def _tensors(part: torch.nn.Module) -> dict[str, Any]:
    """A module's own tensors, and the state of a metric of torchmetrics."""
    metric = {"_update_count": part._update_count, **part.metric_state} if hasattr(part, "metric_state") else {}
    return {**part._parameters, **part._buffers, **metric}


def _is_left_out(each: Any, name: str) -> bool:
    return isinstance(each, LightningModule) and name.startswith("_")


class TrainerState(State):
    """Module and optimizers, and what Lightning's own checkpoint would hold beside them."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None) or torch.amp.GradScaler(enabled=False)
        super().__init__(module, trainer.optimizers, scaler)
        self._trainer, self._module = trainer, module
        self._kinds = kinds = TrainerKinds(module, trainer)
        own: dict[str, Any] = {}
        for each in callbacks_of(trainer, Callback):
            if kinds.is_users(type(each)) and not _describes(each, Callback):
                own[f"{each.state_key} {len(own)}" if each.state_key in own else each.state_key] = each
        if not _describes(module, LightningModule):
            own["the module"] = module
        self._attributes = Attributes(own, kinds, _is_left_out)
        """Those of the module, and of a program's callbacks without a state_dict."""
        self._has_begun, self.lines = False, self._attributes.lines
        self.unkept = [name for name, value in self._parts().items() if codec.unkept(value)]
        """The names of the states that no checkpoint can hold."""

    def _kept(self) -> dict[str, Any]:
        kept = {name: value for name, value in self._parts().items() if not codec.unkept(value)}
        self._kinds.others = resumable.memory(self._module)
        own = {ATTRIBUTES: self._attributes.encode({})} if self._has_begun else {}
        return super()._kept() | kept | own

    def begin_callbacks(self) -> None:
        """Gives callbacks without a state_dict, which have all begun, their attributes in the checkpoint."""
        if not self._has_begun:
            self._has_begun, self._kinds.others = True, resumable.memory(self._module)
            self._attributes.begin()
            if (content := self._restored.pop(ATTRIBUTES, None)) is not None:
                self._attributes.give_back(self._attributes.decode(content)[0])

    def give_back(self, schedulers: list[Any]) -> None:
        """Restores callbacks, module and data module from the run's checkpoint, as Lightning does from its own. They
        see Lightning's keys, too, with the values of now and these states of `schedulers`."""
        if not self._restored:
            return
        connector = private.checkpoint_connector(self._trainer)
        whole = connector.dump_checkpoint(weights_only=False)
        whole |= {"lr_schedulers": schedulers, "state_dict": self._module.state_dict(), "callbacks": {}}
        for name, value in [each for each in self._restored.items() if each[0] != ATTRIBUTES]:
            holder, _, key = name.rpartition(" of ")
            (whole["callbacks"] if holder else whole)[key] = self._module.state_dict() if value is None else value
        private.set_loaded(connector, whole)
        private.on_load_checkpoint(self._trainer, whole)
        connector.restore_datamodule()
        connector.restore_callbacks()
        private.set_loaded(connector, {})

    def _parts(self) -> dict[str, Any]:
        """What is kept, by name: "state of KEY" is a callback's. None stands for the module's own tensors, which the
        checkpoint holds already."""
        whole = private.checkpoint_connector(self._trainer).dump_checkpoint(weights_only=False)
        own = {each.data_ptr() for each in self._module.state_dict().values() if isinstance(each, torch.Tensor)}
        parts = {f"state of {key}": state for key, state in whole.pop("callbacks", {}).items()}
        for name, value in whole.items():
            if name not in ELSEWHERE and not name.endswith(HYPER_PARAMETERS):
                tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
                parts[name] = None if tensors and all(each.data_ptr() in own for each in tensors) else value
        return parts


def _describes(each: Any, base: type) -> bool:
    """Whether an object says itself what a checkpoint is to hold of it."""
    names = ("state_dict", "on_save_checkpoint") if base is Callback else ("on_save_checkpoint",)
    return any(getattr(type(each), name) is not getattr(base, name) for name in names)


class Program(resumable.Trained):
    """What a Trainer trains, beside its tensors; see `hvdtrain.run.session.Program`."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module, self.model, self.optimizers = trainer, module, module, trainer.optimizers
        refuse(trainer.callbacks, "FaultTolerance", REFUSED | NOT_RESUMED)  # type: ignore[attr-defined]
        self.state = TrainerState(trainer, module)
        self._began = given_settings(trainer.optimizers, [each.scheduler for each in trainer.lr_scheduler_configs])
        """The settings with which the run began."""
        self.ended: dict[str, Any] = {}
        """How the training ended before its last epoch; see `hvdtrain.run.session.UserHooks.end_early`."""
        self._resumed_groups: list[Any] | None = None
        """The settings of the optimizers' groups, from a resume until the first batch after it."""
        self._is_partial = False
        """Whether this epoch was resumed inside."""
        self.left_out: Any = 0
        """How many micro-batches had a loss that is not finite since the last totals."""
        averages = callbacks_of(trainer, StochasticWeightAveraging)
        one_more = any(each.pl_module_contains_batch_norm(module) for each in averages)  # to measure its statistics
        self.epochs: int = sys.maxsize if trainer.max_epochs in {None, -1} else trainer.max_epochs + one_more
        self.max_steps = trainer.max_steps if trainer.max_steps != -1 and module.automatic_optimization else None
        self.asked = {
            "epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "max_time": [private.duration(each) for each in callbacks_of(trainer, Timer)],
            "patience": [each.patience for each in callbacks_of(trainer, EarlyStopping)],
        }
        """The limits that end the training."""

    @property
    def data(self) -> GlobalBatches | None:
        """The data module, where it is a GlobalBatches."""
        module = getattr(self.trainer, "datamodule", None)
        return module if isinstance(module, GlobalBatches) else None

    def length(self, ranks: int) -> UserSampling:
        """How far the Trainer goes: counted in examples with GlobalBatches, else in updates. Raises LoopError."""
        batches, passes, data = self.trainer.num_training_batches, self.trainer.accumulate_grad_batches, self.data
        if math.isinf(batches):
            raise LoopError(
                "the training data have no length, so the ranks could not agree on an epoch's end; give "
                "Trainer(limit_train_batches=N)."
            )
        batch = data.batch_size * passes // data.sampling.accumulation_steps if data else 1
        examples = batch * math.ceil(batches / passes)
        return UserSampling(batch, examples, ranks, epochs=self.epochs, max_steps=self.max_steps)

    def seen(self, outputs: Any, count: int) -> StepOutput | None:
        """The loss of a micro-batch of `count` examples, where training_step has returned it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        # Lightning has divided it by the number of micro-batches, except with manual optimization.
        factor = self.trainer.accumulate_grad_batches if self.module.automatic_optimization else 1
        loss = loss.detach().reshape(()).double() * factor
        sums, is_finite = getattr(self.trainer.strategy, "seen", None) or (loss * count, count), loss.isfinite()
        self.left_out = self.left_out + ~is_finite
        first, *rest = (torch.where(is_finite, each, 0.0) for each in (loss, *sums))
        return StepOutput(first, count, {"loss": tuple(rest)})

    def check_program(self) -> None:
        """Raises LoopError where the training could not be resumed."""
        resumable.check_owners(self.module, self.trainer.optimizers)
        if self.trainer.ckpt_path:
            raise LoopError(
                f"Trainer.fit got ckpt_path={str(self.trainer.ckpt_path)!r}, but FaultTolerance resumes from its own "
                "folder; leave it out, and load weights into the module before fit."
            )
        self.metadata()

    def curve_line(self, size: int) -> str:
        return curve_line(self.module, size, "sync_batchnorm=True with RankDDPStrategy")

    def metadata(self) -> dict[str, Any]:
        groups = [resumable.settings(optimizer.param_groups) for optimizer in self.trainer.optimizers]
        schedulers = [of_scheduler(config.scheduler) for config in self.trainer.lr_scheduler_configs]
        loops = self.trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # the state of a loader that keeps its own position
        return {
            "groups": resumable.packed(groups, "the optimizers"),
            "schedulers": resumable.packed(schedulers, "a scheduler"),
            "loops": resumable.packed(loops, "Lightning's loop"),
            "data": self._order,
            "began": self._began,
            "ended": self.ended,
        }

    def restore(self, meta: Mapping[str, Any], progress: Progress) -> str:
        """Continues from a checkpoint; returns a line where the data have changed. Raises CheckpointError and
        LoopError."""
        groups, schedulers = (resumable.unpacked(meta[name]) for name in ("groups", "schedulers"))
        self._set_groups(groups, progress.step)
        restore_loops(self.trainer, resumable.unpacked(meta["loops"]), progress)
        self.state.give_back(schedulers)
        if averages_weights(self.trainer):
            schedulers = []  # StochasticWeightAveraging makes its own scheduler anew
            self.trainer.lr_scheduler_configs.clear()
        self._is_partial, self._resumed_groups = progress.sample > 0, groups
        configs = self.trainer.lr_scheduler_configs
        for name, saved, own in (("optimizers", groups, self.trainer.optimizers), ("schedulers", schedulers, configs)):
            if len(saved) != len(own):
                raise CheckpointError(
                    f"the checkpoint of step {progress.step} has {len(saved)} {name}, this module {len(own)}",
                    remedy=OTHER_FOLDER,
                )
        for config, state in zip(configs, schedulers, strict=True):
            load_scheduler(config.scheduler, state)
        given, self._began = self._began, meta.get("began", {})
        news = take_data(meta["data"], self._order, progress), changed_settings(given, self._began)
        return "; ".join(filter(None, news))

    def _set_groups(self, groups: list[Any], step: int) -> None:
        for optimizer, settings in zip(self.trainer.optimizers, groups, strict=False):  # `restore` refuses others
            resumable.set_settings([optimizer], settings, step)

    @property
    def _order(self) -> dict[str, Any]:
        """The values that the order of the samples depends on."""
        data = self.data
        return {"batch_size": data.batch_size, "seed": data.seed, **data.train.contents()} if data else {}

    def begin_batch(self) -> None:
        """Before the first batch after a resume: calls what Lightning leaves out inside an epoch, and restores the LR,
        which the new scheduler of StochasticWeightAveraging has changed."""
        if self._resumed_groups is None:
            return
        groups, self._resumed_groups = self._resumed_groups, None
        if self._is_partial:
            for kind in (GradientAccumulationScheduler, StochasticWeightAveraging):
                for callback in callbacks_of(self.trainer, kind):
                    callback.on_train_epoch_start(self.trainer, self.module)
        if averages_weights(self.trainer):
            self._set_groups(groups, 0)

    def partly_logged(self) -> list[str]:
        """At the end of an epoch that was resumed inside: a line for each value of the training steps that callbacks
        decide by, as it lacks the steps before the resume."""
        if not self._is_partial:
            return []
        self._is_partial = False
        logged = [each.meta for each in private.logged(self.trainer).values() if each.meta.on_epoch]
        names = monitored(self.trainer) & {name for of in logged for name in (of.name, of.forked_name(on_step=False))}
        return [
            f"{name} of this epoch is that of the steps since the resume, and callbacks decide by it; monitor a value "
            "of the validation"
            for name in sorted(names)
        ]


def callbacks_of(trainer: Any, kind: Any) -> list[Any]:
    """The Trainer's callbacks of that class."""
    return [each for each in trainer.callbacks if isinstance(each, kind)]


def stopped_by(trainer: Trainer) -> str:
    """What has ended the training before its last epoch."""
    stopped = [each for each in callbacks_of(trainer, EarlyStopping) if each.stopped_epoch]
    return ", ".join(f"EarlyStopping by {each.monitor}" for each in stopped) or "trainer.should_stop"


def averages_weights(trainer: Trainer) -> bool:
    """Whether StochasticWeightAveraging had begun to average when the checkpoint was written."""
    return any(private.has_begun(each) for each in callbacks_of(trainer, StochasticWeightAveraging))


def take_average(trainer: Trainer, module: LightningModule) -> None:
    """Gives the module the averaged weights with which a training ends that has averages."""
    averages = [
        each for each in callbacks_of(trainer, StochasticWeightAveraging) if not private.contains_batch_norm(each)
    ]
    for callback in [*callbacks_of(trainer, WeightAveraging), *averages]:
        callback.on_train_end(trainer, module)


def unkept(program: Program, folder: str) -> list[str]:
    """A line for each thing that cannot be resumed with this Trainer."""
    lines = []
    if not program.data:
        lines.append(
            "the order of the samples is the data loader's: other for another number of ranks, and a resumed epoch "
            "reads from its beginning; hl.GlobalBatches keeps both"
        )
    if not program.module.automatic_optimization:
        lines.append("manual optimization: a step is a batch, and the loss is logged if training_step returns it")
    if names := program.state.unkept:
        lines.append(f"no checkpoint holds {', '.join(names)}: it begins anew; keep numbers, text and tensors")
    if callbacks_of(program.trainer, ModelCheckpoint):
        lines.append(
            f"ModelCheckpoint writes checkpoints beside those of {folder}, which alone are resumed from; "
            "Trainer(enable_checkpointing=False) leaves them out"
        )
    return lines


def restore_loops(trainer: Trainer, loops: dict[str, Any], progress: Progress) -> None:
    """Restores Lightning's counters, as they are after a batch inside an epoch, or between two epochs."""
    fit, inside = trainer.fit_loop, progress.sample > 0
    batches: Any = fit.epoch_loop.batch_progress
    fit.load_state_dict(loops)
    for tracker in vars(fit.epoch_progress).values():
        tracker.ready = tracker.started = progress.epoch + inside
        tracker.processed = tracker.completed = progress.epoch
    private.set_stepped(trainer, progress.step - inside)
    batches.is_last_batch = False  # the batch that was ready may have been the last
    for tracker in (batches.total, batches.current):
        tracker.ready = tracker.started = tracker.processed  # a checkpoint is written once a batch is ready
        tracker.completed = tracker.processed - inside  # Lightning counts it once it has restarted
    private.set_restarting(trainer, inside)
