"""The plan of a run: the numbers that follow from recipe, ranks and data, known before a framework is loaded."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.core import optimizers
from hvdtrain.core.network import Network, curve_line, end_of
from hvdtrain.core.recipe import Recipe, augmentation, classes, finetuning, noise, stopping, text
from hvdtrain.core.recipe.keys import LOSSES
from hvdtrain.core.schedule import Schedule, peak_lr
from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.core.wording import counted
from hvdtrain.datasets import DATASETS, DRAWS, Dataset
from hvdtrain.errors import PlanError
from hvdtrain.untrusted import printable, without_secrets

INCEPTION_SIDE = 299
"""The side of the smallest images, in pixels: they leave the auxiliary classifier's last convolution one pixel."""


@dataclass(frozen=True)
class Plan:
    """The numbers of one run that follow from its recipe. Batches count examples, steps count updates."""

    recipe: Recipe
    size: int
    train_examples: int
    valid_examples: int
    global_batch: int
    local_batch: int
    micro_batch: int
    steps_per_epoch: int
    total_steps: int
    parameters: int
    """The number of trainable parameters; 0 where it is unknown."""
    schedule: Schedule
    flops: int | None = None
    """FLOPs of one example's forward pass; None where they were not counted."""
    has_batch_norm: bool = False
    has_dropout: bool = False
    may_be_uneven: bool = False
    """Whether local batches may differ by one example."""
    draws: int = DRAWS
    """How many uniform numbers augment each example."""
    shards: tuple[int, ...] = ()
    """The number of training examples in each shard, where ranks read shard after shard; else ()."""
    items: tuple[int, ...] = ()
    """The number of training examples in each item, where a data set computes them item by item; else ()."""
    labels: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    """The label of each training example, where an epoch has each class alike often; else None."""
    class_weights: tuple[float, ...] = ()
    """The weight of each class in the training loss; () where all are alike, or not known."""
    notes: tuple[str, ...] = ()
    """Lines about the data on this node, as the data set has them."""
    frozen: int = 0
    """How many of the parameters never learn."""
    parts: tuple[str, ...] = ()
    """Lines on the weights that the run starts from, and on parameters that learn apart."""
    reduced: str = ""
    """How images were reduced as they were packed, as a text; "" where they were not."""
    by_index: bool = False
    """Whether the order of an epoch is computed by index."""
    end: int | None = None
    """The token at which attention ends, where it is to stay inside documents; else None."""

    @property
    def epochs(self) -> int:
        return self.recipe.epochs

    @property
    def max_steps(self) -> int | None:
        return self.recipe.max_steps

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def accumulation_steps(self) -> int:
        return self.recipe.accumulation_steps

    @property
    def repeats(self) -> int:
        return self.recipe.augment_repeats

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that a rank communicates in a step."""
        return (self.parameters - self.frozen) * (COMPRESSIONS[self.recipe.compression].bytes or self._parameter_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the weights, the optimizer's state and the averaged weights; the small rest is left out."""
        kept = self.frozen + (self.parameters - self.frozen) * optimizers.copies(self.recipe)
        return kept * self._parameter_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the weights, gradients, optimizer's state and averaged weights that a rank holds."""
        return self.checkpoint_bytes + (self.parameters - self.frozen) * self._parameter_bytes

    @property
    def _parameter_bytes(self) -> int:
        return 8 if self.recipe.precision == "float64" else 4

    def to_json(self) -> dict[str, Any]:
        """The numbers without the recipe, which is a file of its own."""
        numbers = asdict(self) | {"class_weights": [*self.class_weights]}
        for key in ("recipe", "shards", "items", "labels", "notes", "by_index", "end"):
            del numbers[key]
        return numbers | {name: getattr(self, name) for name in ("gradient_bytes", "checkpoint_bytes", "state_bytes")}

    def may_have(self, size: int) -> bool:
        """Whether fewer ranks, `size`, could train with the same global batches."""
        if self.recipe.batch_size is None:
            return False
        together = 2 if augmentation.mixes(self.recipe) else 1
        return self.may_be_uneven or self.global_batch % (size * self.accumulation_steps * together) == 0

    def weight(self, examples: int) -> float:
        """Weight of a rank's mean over `examples` in the mean over all ranks; 1 where all local batches are equal."""
        return examples * self.recipe.accumulation_steps * self.size / self.global_batch

    def lines(self) -> list[str]:
        """The plan for a reader: each number, and how it follows from the recipe."""
        r = self.recipe
        loss = r.step or (None if r.loss in LOSSES else r.loss)
        rest = self.train_examples - self.steps_per_epoch * self.global_batch
        least = self.global_batch // self.size
        local = f"{least}" if least == self.local_batch else f"{least} or {self.local_batch}"
        micro = f" in {r.accumulation_steps} micro-batches of {self.micro_batch}" if r.accumulation_steps > 1 else ""
        left_out = f" ({counted(rest, 'example')} left out, others each epoch)" if rest else ""
        capped = " (max_steps)" if self.total_steps < r.epochs * self.steps_per_epoch else ""
        given = _arguments(r)
        norms = [""] if self.has_batch_norm and r.batch_norm == "local" else []
        curve = curve_line(self.size, norms, "batch_norm: sync", self.has_dropout)
        return [
            f"recipe      {r.name}: {r.model} ({_counted(self.parameters, 'parameters')}) on {r.dataset}, "
            f"{counted(self.train_examples, 'example')} to train, {_counted(self.valid_examples, 'to validate')}",
            *(f"data        {note}" for note in (*self.notes, self.reduced) if note),
            *([f"loss        {loss}: a mean over examples, or (sum, count)"] if loss else []),
            *([f"arguments   {given}"] if given else []),
            *classes.lines(r, self.class_weights, self.labels),
            *augmentation.lines(r, self.train_examples),
            *text.lines(r, self.global_batch),
            f"batch       {self.global_batch} = {counted(self.size, 'rank')} x {local}{micro}",
            f"steps       {self.steps_per_epoch} an epoch{left_out}, {counted(r.epochs, 'epoch')}, "
            f"{self.total_steps} in all{capped}",
            f"LR          {_lr_text(self)}",
            *stopping.lines(r),
            *self.parts,
            *noise.lines(r),
            *([f"curve       {curve}"] if curve else []),
            *_cost_lines(self),
        ]


def _arguments(recipe: Recipe) -> str:
    """The arguments of the user's code as Python has them: YAML reads 010 as 10, and 12:30 as a text."""
    kinds = "model_args", "dataset_args", "optimizer_args"
    given = [(kind, without_secrets(getattr(recipe, kind))) for kind in kinds]
    texts = [f"{kind}: {', '.join(f'{name}={value!r}' for name, value in of.items())}" for kind, of in given if of]
    return printable("; ".join(texts), 500)


def _lr_text(plan: Plan) -> str:
    r, peak = plan.recipe, f"{plan.schedule.peak_lr:g}"
    if r.lr_rule == "none":
        peak += " (rule none: not scaled)"
    else:
        ratio = f"{plan.global_batch}/{r.base_batch_size}"
        peak += f" = {r.base_lr:g} x {ratio if r.lr_rule == 'linear' else f'sqrt({ratio})'} (rule {r.lr_rule})"
    warmup = f"{r.warmup_epochs:g} of {counted(r.epochs, 'epoch')}" if r.warmup_epochs else ""
    warmup = f"{r.warmup_tokens:,} tokens" if r.warmup_tokens else warmup
    warmup = f"warm-up over {warmup}, then " if warmup else ""
    end = f"after {r.decay_tokens:,} tokens" if r.decay_tokens else f"at epoch {r.epochs}"
    decay = {
        "constant": "constant",
        "step": f"x{r.lr_factor:g} at epochs {', '.join(map(str, r.lr_milestones))}",
        "cosine": f"cosine to {r.lr_floor * plan.schedule.peak_lr:g} {end}",
        "plateau": f"x{r.lr_factor:g} after {counted(r.plateau_patience, 'epoch')} without a better validation loss",
    }[r.lr_schedule]
    return f"{peak}; {warmup}{decay}"


def _cost_lines(plan: Plan) -> list[str]:
    """What a step and a checkpoint take, as far as the network's parameters and FLOPs were counted."""
    lines = [f"precision   {plan.recipe.precision}"]
    if plan.parameters:
        gradients, checkpoint, state = (
            f"{size / 2**20:,.1f} MiB" for size in (plan.gradient_bytes, plan.checkpoint_bytes, plan.state_bytes)
        )
        lines = [
            f"{lines[0]}; gradients of {gradients} a step and rank; a checkpoint of {checkpoint}",
            f"memory      {state} a rank for weights, gradients and the optimizer's state; what the layers keep for "
            f"the backward pass comes on top; rank 0's host holds one checkpoint more, {checkpoint}, from its first "
            "checkpoint on",
        ]
    if plan.flops is not None:
        of_step = _scaled(3 * plan.flops * plan.global_batch)
        lines.append(
            f"FLOPs       {_scaled(plan.flops)} an example forward, {of_step} a step "
            f"(x 3 for forward and backward, x {counted(plan.global_batch, 'example')}); a multiply-add is 2"
        )
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number else f"an unknown number {'' if what.startswith('to ') else 'of '}{what}"


def _scaled(flops: int) -> str:
    """A number of FLOPs as text, as in 8.18 GFLOPs."""
    power = min(5, max(0, (len(str(flops)) - 1) // 3))
    return f"{flops / 1000**power:.4g} {['', 'k', 'M', 'G', 'T', 'P'][power]}FLOPs"


def make(recipe: Recipe, size: int, dataset: Dataset, network: Network) -> Plan:
    """The plan of a run whose global batch is divided into `size` local batches.

    Raises PlanError where the global batch cannot be divided into local batches and micro-batches, or is larger than
    the training set, or where images or micro-batches are too small for the network.
    """
    examples, micro_batches = len(dataset.train), recipe.accumulation_steps
    global_batch = recipe.batch_size or (recipe.batch_size_per_rank or 0) * size
    may_be_uneven = _may_be_uneven(recipe, network, global_batch, size)
    together = 2 if augmentation.mixes(recipe) else 1
    if global_batch % (size * micro_batches * together) and not may_be_uneven:
        raise PlanError(_indivisible(recipe, size))
    if global_batch > examples:
        raise PlanError(
            f"the global batch must be at most the {examples} training examples, got {global_batch}; "
            f"give a smaller batch or fewer ranks than {size}."
        )
    _check_side(recipe, dataset)
    _check_batch_norm(recipe, dataset, size, global_batch)
    parts = finetuning.parts(recipe, network.sizes, network.norms) if network.sizes else {}
    frozen = sum(network.sizes[name] for name, part in parts.items() if part.is_frozen)
    steps = examples // global_batch
    balances = "sample balanced" if recipe.sample == "balanced" else ""
    by_label = balances or ("class_weights balanced" if recipe.class_weights == "balanced" else "")
    labels = classes.labels_of(dataset, by_label) if by_label else None
    warmup, decay_end = text.warmup_and_end(recipe, steps * global_batch)
    schedule = Schedule(
        peak_lr=peak_lr(recipe.base_lr, recipe.base_batch_size, global_batch, recipe.lr_rule),
        steps_per_epoch=steps,
        epochs=decay_end,
        warmup_epochs=warmup,
        floor=recipe.lr_floor,
        decay=recipe.lr_schedule,
        milestones=recipe.lr_milestones,
        factor=recipe.lr_factor,
        patience=recipe.plateau_patience,
    )
    return Plan(
        recipe=recipe,
        size=size,
        train_examples=examples,
        valid_examples=len(dataset.valid),
        global_batch=global_batch,
        local_batch=math.ceil(global_batch / size),
        micro_batch=math.ceil(global_batch / size / micro_batches),
        steps_per_epoch=steps,
        total_steps=min(recipe.epochs * steps, recipe.max_steps or recipe.epochs * steps),
        parameters=network.parameters,
        flops=network.flops,
        has_batch_norm=network.has_batch_norm and network.parameters > 0,
        has_dropout=network.has_dropout,
        may_be_uneven=may_be_uneven,
        frozen=0 if recipe.freeze_until_epoch else frozen,
        parts=tuple(finetuning.lines(recipe, parts, network.sizes)),
        schedule=schedule,
        draws=augmentation.draws(recipe, dataset),
        shards=dataset.shards,
        items=dataset.items,
        labels=labels if balances else None,
        class_weights=classes.weights_of(recipe.class_weights, labels, dataset),
        notes=dataset.notes,
        reduced=str(dataset.reduced),
        by_index=dataset.by_index,
        end=end_of(recipe, dataset),
    )


def _check_side(recipe: Recipe, dataset: Dataset) -> None:
    if recipe.model == "inception_v3" and dataset.sample_shape and dataset.sample_shape[0] < INCEPTION_SIDE:
        side = DATASETS[recipe.dataset].side if recipe.dataset in DATASETS else 0
        remedy = f"give {side} {INCEPTION_SIDE}" if isinstance(side, str) else "take another data set"
        raise PlanError(
            f"model inception_v3 needs training images of at least {INCEPTION_SIDE} pixels, {recipe.dataset} gives "
            f"{dataset.sample_shape[0]}; {remedy}."
        )


def _check_batch_norm(recipe: Recipe, dataset: Dataset, size: int, global_batch: int) -> None:
    """Raises PlanError where the smallest feature map has one value in a micro-batch, and so no variance."""
    if not dataset.sample_shape or recipe.batch_norm == "frozen":
        return
    of_image = dataset.sample_shape[0]
    side = {
        "resnet50": math.ceil(of_image / (8 if recipe.stem == "cifar" else 32)),
        "resnet101": math.ceil(of_image / 32),
        "inception_v3": 1 + (of_image - INCEPTION_SIDE) // 48,  # in the auxiliary classifier
    }.get(recipe.model)
    if side is None:
        return
    together = size if recipe.batch_norm == "sync" else 1
    seen = global_batch // (size * recipe.accumulation_steps) * together
    if seen * side * side < 2:
        raise PlanError(
            f"BatchNorm needs at least 2 examples in a micro-batch, got {seen} (batch {global_batch} over "
            f"{counted(size, 'rank')} in {counted(recipe.accumulation_steps, 'micro-batch')}); "
            "take a larger batch or batch_norm frozen."
        )


def _may_be_uneven(recipe: Recipe, network: Network, global_batch: int, size: int) -> bool:
    """Whether local batches may differ by one example: the ranks must exchange nothing but the mean gradient, and the
    loss must be known to be a mean over examples."""
    return (
        (not network.has_batch_norm or recipe.batch_norm == "frozen")
        and not recipe.step
        and recipe.loss in {None, *LOSSES}
        and recipe.accumulation_steps == 1
        and not augmentation.mixes(recipe)
        and recipe.reduction == "average"
        and recipe.batch_size is not None
        and global_batch >= size
    )


def _indivisible(recipe: Recipe, size: int) -> str:
    of_rank = recipe.batch_size_per_rank
    key, batch = ("batch_size_per_rank", of_rank) if of_rank else ("batch_size", recipe.batch_size or 0)
    factors = {"ranks": 1 if of_rank else size, "accumulation steps": recipe.accumulation_steps}
    factors["examples of a pair that is mixed"] = 2 if augmentation.mixes(recipe) else 1
    step = math.prod(factors.values())
    low, high = batch // step * step, (batch // step + 1) * step
    choices = f"{low} or {high}" if low else f"{high}"
    rule = " x ".join(f"{count} {what}" for what, count in factors.items() if count > 1)
    return f"{key} must be a multiple of {rule}, got {batch}; take {choices}."
