"""The Lightning adapter: `python -m hvdtrain.lightning RECIPE [--strategy ddp|horovod] [flags]`."""

import sys

from hvdtrain import interrupts

if __name__ == "__main__":  # before the imports, which take a while
    interrupts.listen()

from hvdtrain import run
from hvdtrain.errors import EngineUnavailable, RecipeError
from hvdtrain.recipe import Recipe


def train(prepared: run.Run) -> None:
    """Imports the framework only now that recipe, data and output folder have been found good."""
    check(prepared.recipe)
    try:
        with interrupts.postponed():
            import lightning.pytorch  # noqa: F401
    except ImportError as error:
        raise EngineUnavailable(
            f"Lightning cannot be imported ({error}); install it: pip install -e .[lightning]"
        ) from None
    with interrupts.postponed():
        from hvdtrain.lightning.train import train as train_with_lightning

    train_with_lightning(prepared)


def check(recipe: Recipe) -> None:
    """Refuses what Lightning's Trainer cannot do. Raises RecipeError."""
    if recipe.reduction != "average":
        raise RecipeError(f"reduction {recipe.reduction} is hvdtrain.torch's; drop it, or train with hvdtrain.torch.")
    if recipe.profile:
        raise RecipeError("profile is hvdtrain.torch's; drop it, or train with hvdtrain.torch.")
    if recipe.compile:
        raise RecipeError("compile is hvdtrain.torch's; drop it, or train with hvdtrain.torch.")
    if recipe.precision == "float16" and recipe.clip_norm and recipe.fused_optimizer:
        raise RecipeError(
            "clip_norm with precision float16 needs a plain optimizer in Lightning: the fused one unscales by itself; "
            "drop fused_optimizer."
        )


if __name__ == "__main__":
    run.end(run.main("lightning", sys.argv[1:], train))
