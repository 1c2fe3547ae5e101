"""The named optimizers, with their arguments and defaults, which are the same in both frameworks."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from hvdtrain.core import user_code
from hvdtrain.core.wording import misfit, nearest
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import one_line, printable, quoted

Fraction = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, le=1e38)]
Betas = Annotated[tuple[Fraction, ...], Field(strict=False, min_length=2, max_length=2)]

KEYS = ("momentum", "nesterov", "weight_decay")
"""Keys of a recipe that are also arguments of an optimizer."""


class Recipe(Protocol):
    """The keys of a recipe that say which optimizer, and with what it goes."""

    optimizer: str
    optimizer_args: dict[str, Any]
    ema_decay: float | None
    reduction: Literal["average", "adasum"]
    fused_optimizer: bool


class Settings(BaseModel):
    """An optimizer's arguments, and what it keeps. The plan gives the LR of each step."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    has_step: ClassVar[bool] = False
    """Whether it counts its updates: PyTorch keeps a number for each parameter, TensorFlow one for all."""
    is_fused: ClassVar[bool] = False
    """Whether PyTorch has a fused kernel for it, which also runs in a CUDA graph."""

    weight_decay: NotNegative = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the tensors that it keeps for each parameter, each as large as the parameter: those of PyTorch's
        optimizer, which checkpoints have too."""
        return ()


class Momentum(Settings):
    """Arguments of the optimizers that keep a momentum, unless it is 0."""

    momentum: Fraction = 0.0

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


class SGD(Momentum):
    """As torch.optim.SGD: weight decay is added to the gradient, the LR is applied after the momentum."""

    is_fused = True
    nesterov: bool = False


class Adam(Settings):
    """Kingma and Ba 2015, arXiv:1412.6980, algorithm 1. Weight decay is added to the gradient (torch.optim.Adam)."""

    has_step = True
    is_fused = True
    betas: Betas = (0.9, 0.999)
    eps: PositiveFloat = 1e-8

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


class AdamW(Adam):
    """Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2: weight decay apart from the gradient."""


class Lamb(Adam):
    """You et al. 2020, arXiv:1904.00962, algorithm 2."""

    is_fused = False
    eps: PositiveFloat = 1e-6
    exclude_1d: bool = True
    """Whether biases and the parameters of norms have no weight decay and no trust ratio."""


class Lars(Momentum):
    """You et al. 2017, arXiv:1708.03888, algorithm 1: the LR is applied before the momentum."""

    trust_coefficient: PositiveFloat = 0.001
    eps: NotNegative = 1e-8
    exclude_1d: bool = True


NAMED: dict[str, type[Settings]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "lamb": Lamb, "lars": Lars}


def fused() -> list[str]:
    """The names of the optimizers for which PyTorch has a fused kernel."""
    return [name for name, kind in NAMED.items() if kind.is_fused]


def settings(recipe: "Recipe") -> Settings:
    """The arguments of the recipe's named optimizer, from its keys and optimizer_args. Raises ValidationError."""
    kind = NAMED[recipe.optimizer]
    keys = {key: getattr(recipe, key) for key in KEYS if key in kind.model_fields}
    return kind.model_validate({**keys, **recipe.optimizer_args})


def imported(recipe: "Recipe", make: Callable[[Callable[..., Any]], Any], base: type, name: str) -> Any:
    """The optimizer that `make` returns when it calls the callable which the recipe names by an import path.

    Raises RecipeError where that callable refuses its arguments, or returns anything but a `base`, in messages `name`.
    """
    kind = user_code.load(recipe.optimizer, "optimizer")
    try:
        optimizer = make(kind)
    except (TypeError, ValueError) as error:
        text = f"{one_line(error)}.{user_code.names_hint(error, kind)}"
        raise RecipeError(f"optimizer {recipe.optimizer} refuses its arguments: {text}") from error
    if not isinstance(optimizer, base):
        raise RecipeError(f"optimizer {recipe.optimizer} must return a {name}, got {type(optimizer).__name__}.")
    return optimizer


def identity(recipe: "Recipe") -> str:
    """A text that is the same for two runs if one can load the optimizer's state of the other."""
    if recipe.optimizer not in NAMED:
        arguments: dict[str, Any] = recipe.optimizer_args
        return f"optimizer {recipe.optimizer}" + (f" {arguments}" if arguments else "")
    slots = " and ".join(sorted(settings(recipe).slots))
    return f"optimizer {recipe.optimizer}" + (f" with {slots}" if slots else "")


def copies(recipe: "Recipe") -> int:
    """How many numbers a checkpoint holds for each weight, with the weight itself. An optimizer that is named by an
    import path is assumed to keep two, as Adam does."""
    slots = len(settings(recipe).slots) if recipe.optimizer in NAMED else 2
    return 1 + slots + (recipe.ema_decay is not None)


def check_optimizer(r: "Recipe") -> None:
    """Raises RecipeError where the recipe's optimizer is unknown, or its arguments break a rule."""
    given = [key for key in KEYS if getattr(r, key)]
    if ":" in r.optimizer:
        if given:
            raise RecipeError(f"{given[0]} is of the named optimizers; give {r.optimizer} its own in optimizer_args.")
    elif r.optimizer not in NAMED:
        known = list(NAMED)
        raise RecipeError(
            f"optimizer must be {', '.join(known)}, or an import path such as torch.optim:RAdam, got "
            f"{quoted(r.optimizer)}.{nearest(r.optimizer, known)}"
        )
    else:
        _check_named(r, given)
    if r.optimizer != "sgd" and r.reduction == "adasum":
        raise RecipeError(f"reduction adasum goes with optimizer sgd, got {printable(r.optimizer)}; drop one.")
    if r.fused_optimizer and r.optimizer not in fused():
        raise RecipeError(
            f"fused_optimizer goes with optimizer {', '.join(fused())}, got {printable(r.optimizer)}; drop it."
        )


def _check_named(r: "Recipe", given: list[str]) -> None:
    for key in given:
        takers = [name for name, kind in NAMED.items() if key in kind.model_fields]
        if r.optimizer not in takers:
            raise RecipeError(f"{key} goes with optimizer {' or '.join(takers)}, got {r.optimizer}; drop it.")
        if key in r.optimizer_args:
            raise RecipeError(f"{key} must be given once: as a key, or in optimizer_args; drop one.")
    try:
        found = settings(r)
    except ValidationError as error:
        takes = NAMED[r.optimizer].model_fields
        raise RecipeError(misfit(error, f"optimizer {r.optimizer}", "optimizer_args", takes)) from None
    if isinstance(found, SGD) and found.nesterov and not found.momentum:
        raise RecipeError("nesterov needs momentum above 0, got momentum=0.")
