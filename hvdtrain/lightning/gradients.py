"""Gradients averaged over the ranks while backward computes them, for any module and any optimizer."""

from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from hvdtrain.errors import RecipeError
from hvdtrain.torch.engines.buckets import flat, is_dense, real
from hvdtrain.torch.engines.horovod import COMPRESSIONS, hvd, wait


class Averager:
    """Hands each gradient to Horovod as soon as backward has it, and waits for all of them at the end.

    The optimizers stay what they are: nothing is wrapped, so that schedulers, scalers and checkpoints see no
    difference. A parameter that no rank used keeps the gradient None, as under DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, compression: str) -> None:
        self._module, self._compression = module, COMPRESSIONS[compression]
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._sent: dict[Parameter, tuple[int, torch.Tensor, Any]] = {}
        self._open = False
        learning = [parameter for parameter in self._names if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._computed) for parameter in learning]

    def begin(self) -> None:
        """From here on backward's gradients are averaged."""
        self._open = True

    def finish(self) -> None:
        """Returns once every gradient is the mean over the ranks. Every rank must call it after its backward."""
        self._open = False
        learning = {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        used = torch.tensor([parameter.grad is not None for parameter in learning.values()], dtype=torch.int32)
        counted = hvd.allreduce_async(used, op=hvd.Sum, name="hvdtrain.used")
        for name, parameter in learning.items():
            if parameter not in self._sent:
                self._send(name, parameter)
        for parameter, (handle, compressed, context) in self._sent.items():
            wait(handle, compressed.device.type)
            own = real(parameter.grad)
            if compressed.data_ptr() != own.data_ptr():
                own.copy_(self._compression.decompress(compressed, context))
        self._sent.clear()
        for parameter, ranks in zip(learning.values(), wait(counted).tolist(), strict=True):
            if not ranks:
                parameter.grad = None

    def close(self) -> None:
        """Releases the module: removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _computed(self, parameter: Parameter) -> None:
        if self._open:
            self._send(self._names[parameter], parameter)

    def _send(self, name: str, parameter: Parameter) -> None:
        if parameter in self._sent:
            raise RecipeError(
                f"backward computed the gradient of {name} twice in one step, so it cannot be averaged while it "
                "runs; where it is checkpointed, take torch.utils.checkpoint with use_reentrant=False."
            )
        if parameter.grad is None:  # another rank may have used it
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise RecipeError(f"the gradient of {name} is sparse, which Horovod averages only dense; drop sparse=True.")
        if parameter.grad.is_conj() or not is_dense(parameter.grad):
            parameter.grad = parameter.grad.resolve_conj().contiguous()
        own = real(parameter.grad)
        own = own.float() if own.dtype == torch.bfloat16 else own  # which Horovod has not
        compressed, context = self._compression.compress(own)
        handle = hvd.allreduce_async_(flat(compressed), op=hvd.Average, name=f"gradient.{name}")
        self._sent[parameter] = handle, compressed, context
