"""The recipes' networks, and BatchNorm over the global batch."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvdtrain.errors import RecipeError
from hvdtrain.torch import networks
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.networks import BATCH_NORMS
from hvdtrain.torch.resnet import resnet50

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe


def build(recipe: "Recipe", classes: int | None, engine: Engine) -> nn.Module:
    """The recipe's network on the engine's device, its weights drawn from the recipe's seed alone.

    linear: [n, 1] -> [n, 1], starting at 0. resnet50: images [n, 3, height, width] -> logits [n, classes]. Any other:
    see `hvdtrain.torch.networks`. Raises RecipeError.

    Examples:
        >>> from hvdtrain.core.recipe import load
        >>> from hvdtrain.torch.engines.local import LocalEngine
        >>> build(load("linear"), None, LocalEngine(torch.device("cpu")))
        Linear(in_features=1, out_features=1, bias=True)
    """
    torch.manual_seed(recipe.seed)
    if recipe.model == "linear":
        model: nn.Module = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    elif recipe.model == "resnet50":
        model = resnet50(_known(classes), recipe.stem)
    else:
        model = networks.build(recipe, classes)
    if recipe.batch_norm == "sync":
        model = with_sync_batch_norm(model, engine)
    if recipe.precision == "float64":
        model = model.double()
    memory_format = torch.channels_last if recipe.channels_last else torch.preserve_format
    return model.to(engine.device, memory_format=memory_format)


def _known(classes: int | None) -> int:
    if classes is None:
        raise RecipeError(
            "model resnet50 needs a data set that has classes; take model torchvision:resnet50 with model_args "
            "num_classes=N."
        )
    return classes


def training_mode(model: nn.Module, recipe: "Recipe") -> None:
    """Training mode, but for BatchNorm where its statistics are frozen.

    Examples:
        >>> from hvdtrain.core.recipe import load
        >>> model = nn.Sequential(nn.BatchNorm2d(8))
        >>> training_mode(model, load("digits", {"batch_norm": "frozen"}))
        >>> model.training, model[0].training
        (True, False)
    """
    model.train()
    if recipe.batch_norm == "frozen":
        for module in model.modules():
            if isinstance(module, BATCH_NORMS):
                module.eval()


def with_sync_batch_norm(model: nn.Module, engine: Engine) -> nn.Module:
    """The model with every BatchNorm1d, 2d and 3d normalising by the statistics of the global batch.

    Examples:
        >>> from hvdtrain.torch.engines.local import LocalEngine
        >>> model = with_sync_batch_norm(nn.Sequential(nn.BatchNorm2d(8)), LocalEngine(torch.device("cpu")))
        >>> type(model[0]).__name__
        'SyncBatchNorm'
    """
    if isinstance(model, BATCH_NORMS):
        synced = SyncBatchNorm(model.num_features, model.eps, model.momentum, engine, model.affine)
        synced.load_state_dict(model.state_dict(), strict=model.track_running_stats)
        return synced
    for name, child in model.named_children():
        setattr(model, name, with_sync_batch_norm(child, engine))
    return model


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of [n, c] and [n, c, ...] whose training statistics are those of all ranks' examples together.

    Horovod's own and PyTorch's work on GPUs only; this one works wherever the engine does.

    Examples:
        >>> from hvdtrain.torch.engines.local import LocalEngine
        >>> norm = SyncBatchNorm(3, 1e-5, 0.1, LocalEngine(torch.device("cpu")))
        >>> norm(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 3, 8, 8])
    """

    def __init__(self, features: int, eps: float, momentum: float | None, engine: Engine, affine: bool = True) -> None:
        super().__init__(features, eps, momentum, affine)
        self._engine = engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        weight, bias = (self.weight, self.bias) if self.affine else self._unit
        out, mean, variance = _GlobalNorm.apply(x, weight, bias, self.eps, self._engine)
        with torch.no_grad():
            self.num_batches_tracked += 1
            # None is the plain mean over all batches.
            momentum = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance, momentum)
        return out

    def _check_input_dim(self, x: torch.Tensor) -> None:
        """Any that has channels."""

    @property
    def _unit(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(self.running_mean), torch.zeros_like(self.running_mean)


class _GlobalNorm(torch.autograd.Function):
    """Normalises x [n, c, ...] by mean and variance [c] over all ranks; the ranks' sums are added in fixed order.

    Means and squared deviations are combined as in Chan, Golub, LeVeque 1983, so no precision is lost to a
    difference of large sums. Gradient: Ioffe and Szegedy 2015, arXiv:1502.03167, section 3.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, engine: Engine) -> Any:
        wide = x.to(weight.dtype)
        variance, mean = torch.var_mean(wide, dim=_others(wide), correction=0)
        count = torch.full_like(mean, x.numel() / x.shape[1])
        counts, means, variances = engine.gather_rows(torch.cat([count, mean, variance])).chunk(3, dim=1)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _channels(mean, wide)) * _channels(scale, wide)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.engine = engine
        unbiased = variance * total / (total - 1)
        ctx.mark_non_differentiable(mean, unbiased)
        return (normal * _channels(weight, wide) + _channels(bias, wide)).to(x.dtype), mean, unbiased

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normal, scale, weight, total = ctx.saved_tensors
        wide = grad.to(weight.dtype)
        sum_grad = wide.sum(dim=_others(wide))
        sum_product = (wide * normal).sum(dim=_others(wide))
        sums = ctx.engine.gather_rows(torch.cat([sum_grad, sum_product])).sum(0) / total.repeat(2)
        mean_grad, mean_product = sums.chunk(2)
        centred = wide - _channels(mean_grad, wide) - normal * _channels(mean_product, wide)
        grad_x = centred * _channels(weight * scale, wide)
        return grad_x.to(grad.dtype), sum_product, sum_grad, None, None


def _others(x: torch.Tensor) -> list[int]:
    """The dimensions of x [n, c, ...] but the channels'."""
    return [0, *range(2, x.dim())]


def _channels(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(-1, *[1] * (like.dim() - 2))


def average_statistics(model: nn.Module, engine: Engine) -> None:
    """Sets BatchNorm's running statistics to the mean over the ranks, and other buffers to rank 0's, so that all ranks
    hold one model.

    Examples:
        >>> from hvdtrain.torch.engines.local import LocalEngine
        >>> average_statistics(nn.BatchNorm2d(3), LocalEngine(torch.device("cpu")))  # every rank calls it
    """
    if engine.size == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    buffers = [buffer for norm in norms for buffer in norm.buffers() if buffer.is_floating_point()]
    ours = {id(buffer) for norm in norms for buffer in norm.buffers()}
    if others := {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in ours}:
        engine.broadcast(others, None)
    if not buffers:
        return
    flat = torch.cat([b.flatten() for b in buffers]).cpu()
    mean = torch.from_numpy(engine.sum(flat.numpy())) / engine.size
    for buffer, part in zip(buffers, mean.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def fingerprint(model: nn.Module, with_statistics: bool) -> int:
    """64 bits that change when any bit of the weights does (and of BatchNorm's statistics, where asked).

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> before = fingerprint(model, with_statistics=False)
        >>> _ = model.bias.data.add_(1e-3)
        >>> fingerprint(model, with_statistics=False) == before
        False
    """
    tensors = list(model.state_dict().values()) if with_statistics else list(model.parameters())
    where = tensors[0].device
    block = 2**16 if where.type == "cpu" else 2**24  # on a CPU a block stays in the cache
    # Odd, different factors: a swap of two values shows, and so does every single changed bit.
    factors = {device: torch.arange(1, 2 * block, 2, device=device) for device in {t.device for t in tensors}}
    total = torch.zeros((), dtype=torch.int64, device=where)
    for tensor in tensors:
        for words in tensor.detach().flatten().view(_word(tensor)).split(block):
            total = total * 1_000_003 + (words * factors[tensor.device][: words.numel()]).sum().to(where)
    return int(total.item())


def _word(tensor: torch.Tensor) -> torch.dtype:
    # 8 bytes as two words of 4: times an even difference of factors, a 64-bit word would lose its sign.
    return {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
