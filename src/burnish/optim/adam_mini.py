"""Adam-mini: AdamW with one second moment per block of weights (Zhang et al. 2024, https://arxiv.org/abs/2406.16793).
If the first moment has the dtype of the weights, the state is half of AdamW's.

For the gradient g of a block b of a parameter W, at update t:

    m = β₁ m + (1 - β₁) g                              as in Adam
    v = β₂ v + (1 - β₂) mean of g² over b              one number per block
    W -= lr * (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε)   after W *= 1 - lr * weight decay

Blocks follow the structure of the Hessian, as in the authors' package adam-mini 1.1.1: one head of a query or key
matrix; one output neuron of the value and output projections and of the MLP; one token of embeddings and head; a norm
as a whole. Biases are trained with AdamW. LoRA's factor B is divided like the matrix that it updates, A by its rows. A
fused matrix of queries, keys and values is divided by neurons.

In:  the parameter groups, and the model with its head size. Out: an optimizer whose state a checkpoint can hold.
Refuses: query and key matrices of a model whose config does not define the head size.
"""

# I inputs, O outputs

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from burnish.config.checks import check
from burnish.config.errors import Problem, UserError
from burnish.config.options import option
from burnish.optim.builtin import OPTIMIZERS, Groups, OptimOptions, adam_arguments, only_adamw, switch_arguments

_QUERY_OR_KEY = re.compile(r"(^|\.)(q_proj|k_proj|wq|wk|query|key|q_lin|k_lin)\.(lora_B\.\w+\.)?weight$")


@dataclass
class AdamMiniOptions:
    """Adam-mini."""

    use_adam_mini: bool = option(False, "Use Adam-mini: AdamW with one second moment per head, neuron or token.")


@check
def check_adam_mini(options: OptimOptions) -> Iterator[Problem]:
    return only_adamw(options, "use_adam_mini", "adam_mini")


@OPTIMIZERS.register("adam_mini", options=AdamMiniOptions, reads_model=True, **switch_arguments("use_adam_mini"))
def adam_mini(groups: Groups, options: OptimOptions, model: nn.Module) -> Optimizer:
    """AdamW with one second moment per block."""
    transposed = {
        f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"
    }  # (I, O): GPT-2's
    named = [(n, p) for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)]
    blocks = {parameter: _blocks_of(name, parameter, model, name in transposed) for name, parameter in named}
    return AdamMini(groups, blocks, **adam_arguments(options))


class Blocks(NamedTuple):
    """The division of a parameter into blocks."""

    view: Callable[[Tensor], Tensor]  # parameter, moment or gradient -> view whose dimensions ``within`` are a block
    within: tuple[int, ...]  # the dimensions of a block


def _blocks_of(name: str, parameter: nn.Parameter, model: nn.Module, is_transposed: bool) -> Blocks:
    if name.endswith("bias"):
        return Blocks(lambda tensor: tensor.unsqueeze(-1), (-1,))
    if parameter.ndim < 2:
        return Blocks(lambda tensor: tensor, tuple(range(parameter.ndim)))
    if is_transposed:
        return Blocks(lambda tensor: tensor, (-2,))
    rows = _head_width(model) if _QUERY_OR_KEY.search(name) else 1
    if rows == 1 or parameter.shape[-2] % rows:
        return Blocks(lambda tensor: tensor, (-1,))
    *outer, _, inputs = parameter.shape
    return Blocks(lambda tensor: tensor.view(*outer, -1, rows, inputs), (-2, -1))


def _head_width(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
        width = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)
    except RuntimeError:  # transformers raises it if layers differ
        what = "use_adam_mini splits queries and keys by head, but the heads of this model differ between layers."
        raise UserError(what, remedy="Remove use_adam_mini.", option="use_adam_mini") from None
    if width is None:
        what = "use_adam_mini splits queries and keys by head, but the model's config has no num_attention_heads."
        raise UserError(what, remedy="Remove use_adam_mini.", option="use_adam_mini")
    return int(width)


class AdamMini(Optimizer):
    """Adam-mini. State per parameter: ``step``, ``exp_avg`` of its shape, ``exp_avg_sq`` (float32, one per block)."""

    def __init__(
        self, groups: Groups, blocks: Mapping[nn.Parameter, Blocks], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.blocks = blocks
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        view, within = self.blocks[parameter]
        squares = view(parameter.grad).float().square().mean(within, keepdim=True)  # type: ignore[arg-type]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(squares)}
        state["step"] += 1
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(squares, 1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        size = group["lr"] / (1 - beta1 ** state["step"])
        view(parameter.data).addcdiv_(view(state["exp_avg"]), scale.to(parameter.dtype), value=-size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state with second moments in float32. torch would cast them to the dtype of the weights, and in
        bfloat16 a decay of a thousandth would be rounded away.
        """
        super().load_state_dict(state)
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for index, parameter in enumerate(parameters):
            if index in state["state"]:
                saved = state["state"][index]["exp_avg_sq"]
                self.state[parameter]["exp_avg_sq"] = saved.to(parameter.device, torch.float32, copy=True)
