"""How gradients may be communicated, which trackers there are, and what messages say of intervals."""

from dataclasses import dataclass

MTBF = "mtbf_hours, the mean hours between failures of the whole job: those of one node divided by the job's nodes"
"""What `checkpoint_every_steps: auto` needs, in the words of messages."""


@dataclass(frozen=True)
class Compression:
    """How gradients are communicated."""

    dtype: str
    """The type in which gradients are sent, by its name in NumPy, PyTorch and TensorFlow; "" for their own type."""
    bytes: int | None
    """Bytes of a number that is sent; None where they are those of a parameter."""
    engines: tuple[str, ...] = ()
    """The engines that have this compression; () for all."""
    text: str = ""
    """What --help says of it."""
    frameworks: tuple[str, ...] = ("torch", "tensorflow")
    """The frameworks that have it."""


COMPRESSIONS = {
    "none": Compression("", None),
    "fp16": Compression("float16", 2, ("horovod", "local", "ddp")),
    "bf16": Compression("bfloat16", 2, ("ddp",), "engine ddp's"),
    "fp64": Compression("float64", 8, text="sums that no order of ranks changes"),
}

TRACKERS = {"tensorboard": "", "wandb": "wandb", "mlflow": "mlflow"}
"""By tracker: the module that its process needs, "" where it has no process. Its pip extra has its name, its class is
`Tracker` in hvdtrain/record/trackers/NAME.py."""
