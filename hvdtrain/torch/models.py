"""The recipes' networks, BatchNorm over the global batch, and an average of the weights."""

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
import xxhash
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hvdtrain.core import network
from hvdtrain.core.recipe import Recipe
from hvdtrain.errors import RecipeError
from hvdtrain.torch import memory, networks
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.gpt import GPT
from hvdtrain.torch.networks import BATCH_NORMS
from hvdtrain.torch.resnet import BLOCKS_OF_101, ResNet, resnet50

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
PRODUCTS = re.compile("(Cudnn|Miopen|Mkldnn)?(Mm|Addmm|Addmv|Bmm|Baddbmm|Conv|Rnn|ScaledDot)")


def build(recipe: Recipe, classes: int | None, engine: Engine, end: int | None = None) -> nn.Module:
    """The recipe's network on the engine's device. Its first weights depend on the recipe's seed alone.

    linear: [n, 1] -> [n, 1], which begins at 0. resnet50, resnet101: images [n, 3, height, width] -> logits
    [n, classes]. gpt: see `hvdtrain.torch.gpt`, also for `end`; its vocabulary are the classes. For any other see
    `hvdtrain.torch.networks`. Raises RecipeError.
    """
    torch.manual_seed(recipe.seed)
    if recipe.model == "linear":
        model: nn.Module = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    elif recipe.model == "resnet50":
        model = resnet50(_checked(recipe, classes), recipe.stem)
    elif recipe.model == "resnet101":
        model = ResNet(_checked(recipe, classes), "imagenet", BLOCKS_OF_101)
    elif recipe.model == "gpt":
        sizes, vocabulary = network.GPT(**recipe.model_args), _checked(recipe, classes)
        model = GPT(sizes, vocabulary, recipe.sequence_length, end, recipe.seed)
    else:
        model = networks.build(recipe, classes)
    if recipe.batch_norm == "sync":
        model = with_sync_batch_norm(model, engine)
    if recipe.checkpoint_activations:
        model = memory.checkpointed(model, recipe.checkpoint_activations)
    if recipe.precision == "float64":
        model = model.double()
    for weight in model.parameters() if recipe.channels_last else ():
        weight.data = weight.data.to(memory_format=LAYOUTS.get(weight.dim(), torch.preserve_format))
    return model.to(engine.device)


def _checked(recipe: Recipe, classes: int | None) -> int:
    if classes is None:
        raise RecipeError(
            f"model {recipe.model} needs a data set that has classes; take model torchvision:{recipe.model} with "
            "model_args num_classes=N."
        )
    return classes


def unmet(recipe: Recipe, model: nn.Module, loss: torch.Tensor) -> list[str]:
    """Lines of the log on keys that do not hold in the graph of a training loss, before backward frees it."""
    seen = new = {loss.grad_fn}
    while new := {each for node in new for each, _ in node.next_functions if each} - seen:
        seen |= new
    products = [str(node._input_metadata[0].dtype)[6:] for node in seen if PRODUCTS.match(node.name())]
    is_other = recipe.precision.endswith("16") and any(each.dtype != torch.float32 for each in model.parameters())
    norms = [node for node in seen if "BatchNorm" in node.name() and getattr(node, "_saved_training", False)]
    local = sum(node._input_metadata[0].shape[0] > 1 for node in norms)  # an InstanceNorm's is 1
    others = f"layers that are scripted, the model's own, or without running statistics: {local}"
    return [
        *network.other_types(recipe.precision, products, "make it without half() and autocast"),
        *["mixed precision needs weights of float32, the model has others"] * is_other,
        *[f"batch_norm {recipe.batch_norm} leaves out {others}"] * (recipe.batch_norm != "local" and local > 0),
        *["compile has compiled nothing"] * (recipe.compile and not torch._dynamo.utils.counters["stats"]),
    ]


def training_mode(model: nn.Module, recipe: Recipe) -> None:
    """Sets training mode, but leaves BatchNorm in evaluation mode where the recipe freezes its statistics."""
    model.train()
    for module in model.modules() if recipe.batch_norm == "frozen" else ():
        if isinstance(module, BATCH_NORMS):
            module.training = False  # eval() would change the modules inside of it, too, such as an activation


def curve_line(model: nn.Module, size: int, remedy: str) -> str:
    """Why the curve of a program's model depends on the number of ranks; see `hvdtrain.core.network.curve_line`."""
    norms = [name or "the model" for name, each in model.named_modules() if _is_local(each)]
    return network.curve_line(size, norms, remedy, networks.has_dropout(model))


def _is_local(module: nn.Module) -> bool:
    """Whether it is a BatchNorm that normalises by its rank's examples, and not by its running statistics."""
    is_together = isinstance(module, SyncBatchNorm) or (
        isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized()
    )
    is_running = not module.training and getattr(module, "track_running_stats", True)
    return isinstance(module, BATCH_NORMS) and not is_together and not is_running


def with_sync_batch_norm(model: nn.Module, engine: Engine) -> nn.Module:
    """The same model, whose BatchNorm layers, and layers of derived classes, now normalise by the statistics of the
    global batch. Nothing else of a layer changes. Raises RecipeError where a layer cannot be changed so."""
    kinds: dict[type, type] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RecipeError(f"{name or 'the model'} is TorchScript, whose BatchNorm stays local; give it unscripted.")
        if isinstance(module, BATCH_NORMS) and not isinstance(module, SyncBatchNorm):
            networks.put_beside(module, SyncBatchNorm, kinds, "Sync", engine=engine)
    return model


class SyncBatchNorm(networks.Beside, nn.modules.batchnorm._BatchNorm):
    """The class that a BatchNorm layer of [n, c] or [n, c, ...] gets beside its own: where the layer calls PyTorch's
    `batch_norm` in training, the statistics are those of all ranks' examples together.

    Horovod's SyncBatchNorm and PyTorch's work on GPUs only; this one works on every device of the engine.
    """

    engine: Engine

    def forward(self, *args: Any, **options: Any) -> Any:
        if not self.training and self.track_running_stats:
            return super().forward(*args, **options)
        with _OverRanks(self.engine) as watch:
            out = super().forward(*args, **options)
        if not watch.was_called:
            raise RecipeError(
                f"{self.kind.__name__} takes its statistics without torch.nn.functional.batch_norm, so they would stay "
                "local; call that in its forward, or take batch_norm local."
            )
        return out


class _OverRanks(TorchFunctionMode):
    """Within the block `batch_norm` in training takes the statistics of the global batch."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self.was_called = engine, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(options or {}))
        self.was_called = True
        bound = _BATCH_NORM.bind(*args, **(options or {}))
        bound.apply_defaults()
        given = bound.arguments
        if not given["training"]:
            return function(*args, **(options or {}))
        out, *now = _GlobalNorm.apply(given["input"], given["weight"], given["bias"], given["eps"], self._engine)
        with torch.no_grad():
            for running, of_batch in zip((given["running_mean"], given["running_var"]), now, strict=True):
                if running is not None:
                    running.lerp_(of_batch.to(running.dtype), given["momentum"])
        return out


_BATCH_NORM = inspect.signature(F.batch_norm)


class _GlobalNorm(torch.autograd.Function):
    """Normalises x [n, c, ...] by mean and variance [c] over all ranks; the ranks' sums are added in a fixed order.

    Means and squared deviations are combined as in Chan, Golub, LeVeque 1983: a difference of large sums would lose
    precision. The gradient is that of Ioffe and Szegedy 2015, arXiv:1502.03167, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, engine: Engine
    ) -> Any:
        if engine.size == 1 and x.numel() == x.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_full(wide.shape[1:2], x.numel() / max(1, x.shape[1]))
        variance, mean = torch.var_mean(wide, dim=_others(wide), correction=0)
        here = torch.cat([count, mean, variance])
        # The mean and variance of a rank without examples are NaN: it sends zeros.
        counts, means, variances = engine.gather_rows(here if x.numel() else here.zero_()).chunk(3, dim=1)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _channels(mean, wide)) * _channels(scale, wide)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.engine, ctx.is_biased = engine, bias is not None
        unbiased = variance * total / (total - 1)
        ctx.mark_non_differentiable(mean, unbiased)
        out = normal if weight is None else normal * _channels(weight, wide)
        return (out if bias is None else out + _channels(bias, wide)).to(x.dtype), mean, unbiased

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normal, scale, weight, total = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        sum_grad = wide.sum(dim=_others(wide))
        sum_product = (wide * normal).sum(dim=_others(wide))
        sums = ctx.engine.gather_rows(torch.cat([sum_grad, sum_product])).sum(0) / total.repeat(2)
        mean_grad, mean_product = sums.chunk(2)
        centred = wide - _channels(mean_grad, wide) - normal * _channels(mean_product, wide)
        grad_x = centred * _channels(scale if weight is None else weight * scale, wide)
        of_weight, of_bias = None if weight is None else sum_product, sum_grad if ctx.is_biased else None
        return grad_x.to(grad.dtype), of_weight, of_bias, None, None


def _others(x: torch.Tensor) -> list[int]:
    """All dimensions of x [n, c, ...] except the channels'."""
    return [0, *range(2, x.dim())]


def _channels(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(-1, *[1] * (like.dim() - 2))


def average_statistics(model: nn.Module, engine: Engine) -> None:
    """Sets BatchNorm's running statistics to their mean over the ranks and other buffers to rank 0's, so that all ranks
    hold the same model. Every rank calls it."""
    share_buffers(model, engine, "rank_0")
    _average([buffer for buffer in _statistics(model) if buffer.is_floating_point()], engine)


def share_buffers(model: nn.Module, engine: Engine, how: Literal["average", "rank_0"]) -> None:
    """Gives all ranks the same values of the buffers outside of BatchNorm: rank 0's, or with `average` the mean over
    the ranks where they are floating-point numbers. Every rank calls it."""
    others = other_buffers(model) if engine.size > 1 else {}
    means = {name: each for name, each in others.items() if how == "average" and each.is_floating_point()}
    if rest := {name: each for name, each in others.items() if name not in means}:
        engine.broadcast(rest, None)
    _average(list(means.values()), engine)


def other_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers outside of BatchNorm, by name."""
    statistics = {id(buffer) for buffer in _statistics(model)}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in statistics}


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers()]


@torch.no_grad()
def _average(buffers: list[torch.Tensor], engine: Engine) -> None:
    if not buffers or engine.size == 1:
        return
    whole = torch.cat([buffer.flatten().double() for buffer in buffers]).cpu()
    mean = torch.from_numpy(engine.sum(whole.numpy())) / engine.size
    for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def fingerprint(model: nn.Module, with_statistics: bool) -> int:
    """64 bits that change with any bit of the weights; and `with_statistics`, with any of BatchNorm's statistics."""
    return digest([*model.parameters(), *(_statistics(model) if with_statistics else ())])


def digest(tensors: list[torch.Tensor]) -> int:
    """64 bits that change with any bit of the tensors."""
    if all(each.is_cpu for each in tensors):
        hashed = xxhash.xxh3_64()
        for tensor in tensors:
            hashed.update(tensor.detach().resolve_conj().resolve_neg().flatten().view(torch.uint8).numpy())
        return int.from_bytes(hashed.digest(), "big", signed=True)
    return digest_on_device(tensors)


def digest_on_device(tensors: list[torch.Tensor]) -> int:
    """Like `digest`, computed where the tensors are."""
    where = tensors[0].device
    block = min(2**20, max(each.nbytes // min(each.element_size(), 4) for each in tensors) or 1)
    # Odd and different factors: a swap of two values changes the sum, and so does a change of any single bit.
    factors = {device: torch.arange(1, 2 * block, 2, device=device) for device in {t.device for t in tensors}}
    total = torch.zeros((), dtype=torch.int64, device=where)
    for tensor in tensors:
        whole = tensor.detach().resolve_conj().resolve_neg().flatten()
        # Numbers of 8 bytes are two words: times an even difference of factors, a 64-bit word would lose its sign.
        word = {2: torch.int16, 1: torch.uint8}.get(tensor.element_size(), torch.int32)
        for words in whole.view(word).split(block):
            total = total * 1_000_003 + (words * factors[tensor.device][: words.numel()]).sum().to(where)
    return int(total.item())


class Ema:
    """The moving average e = decay e + (1 - decay) w of each parameter w; it begins as the weights themselves.

    Buffers, such as BatchNorm's statistics, are not averaged.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = Ema(model, decay=0.5)
        >>> _ = nn.init.ones_(model.weight), nn.init.zeros_(ema.averages["weight"])
        >>> ema.update()
        >>> with ema.swapped_in():
        ...     model.weight.item()
        0.5
        >>> model.weight.item()
        1.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = dict(model.named_parameters())
        self._weight = 1 - decay
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the weights; to be called after each update."""
        torch._foreach_lerp_(list(self.averages.values()), list(self._parameters.values()), self._weight)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model has the averages for weights; afterwards it has its weights again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self.averages[name] = self.averages[name], parameter.data
