"""The PyTorch adapter: `python -m hvdtrain.torch RECIPE [flags]`, and for a loop of yours `hvdtrain.torch.join`."""

from typing import TYPE_CHECKING, Any

from hvdtrain import installed

installed.refuse("numpy", "torch", "horovod", "mpi4py")

__all__ = ["gather", "join"]

if TYPE_CHECKING:
    from hvdtrain.torch.user_loop.gather import gather
    from hvdtrain.torch.user_loop.world import join


def __getattr__(name: str) -> Any:
    """`join` and `gather`, loaded at their first use: a recipe's run loads PyTorch only once its input is checked."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdtrain.torch.user_loop import gather, world

    return getattr(gather if name == "gather" else world, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
