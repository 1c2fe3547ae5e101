"""What is refused of a recipe's optimizer, before a framework is loaded."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

from hvdtrain.core import optimizers
from hvdtrain.core.wording import nearest, rule
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable, quoted

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe


def check(r: "Recipe") -> None:
    """Raises RecipeError where the optimizer is none, or its arguments break a rule."""
    given = optimizers.given_keys(r)
    if ":" in r.optimizer:
        if given:
            raise RecipeError(f"{given[0]} is of the named optimizers; give {r.optimizer} its own in optimizer_args.")
    elif r.optimizer not in optimizers.NAMED:
        known = list(optimizers.NAMED)
        raise RecipeError(
            f"optimizer must be {', '.join(known)}, or an import path such as torch.optim:RAdam, got "
            f"{quoted(r.optimizer)}.{nearest(r.optimizer, known)}"
        )
    else:
        _check_named(r, given)
    if r.optimizer != "sgd" and r.reduction == "adasum":
        raise RecipeError(f"reduction adasum goes with optimizer sgd, got {printable(r.optimizer)}; drop one.")
    if r.fused_optimizer and r.optimizer not in optimizers.FUSED:
        fused = ", ".join(optimizers.FUSED)
        raise RecipeError(f"fused_optimizer goes with optimizer {fused}, got {printable(r.optimizer)}; drop it.")


def _check_named(r: "Recipe", given: list[str]) -> None:
    for key in given:
        takers = [name for name, kind in optimizers.NAMED.items() if key in kind.model_fields]
        if r.optimizer not in takers:
            raise RecipeError(f"{key} goes with optimizer {' or '.join(takers)}, got {r.optimizer}; drop it.")
        if key in r.optimizer_args:
            raise RecipeError(f"{key} must be given once: as a key, or in optimizer_args; drop one.")
    try:
        settings = optimizers.settings(r)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = quoted(str(first["loc"][0]))
        if first["type"] == "extra_forbidden":
            takes = ", ".join(sorted(optimizers.NAMED[r.optimizer].model_fields))
            raise RecipeError(f"optimizer {r.optimizer} has no argument {name}; it takes {takes}.") from None
        each = "each of " if len(first["loc"]) > 1 else ""
        value = quoted(first["input"])
        raise RecipeError(f"{each}{name} in optimizer_args must {rule(first)}, got {value}.") from None
    if isinstance(settings, optimizers.SGD) and settings.nesterov and not settings.momentum:
        raise RecipeError("nesterov needs momentum above 0, got momentum=0.")
