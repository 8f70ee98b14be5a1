"""Tiny model families and helpers that run generation requests to completion, for inference tests."""

from collections.abc import Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3NextConfig,
)

from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import EndReason, GenerationRequest, Logprob, StepOutput
from tiny_models import _COMMON, _LLAMA, CONFIGS, VOCABULARY

SHAPES = {
    **CONFIGS,
    "mistral with a window": lambda: MistralConfig(**_LLAMA, sliding_window=6),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_LLAMA, "num_hidden_layers": 3}, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: Phi3Config(**_COMMON, intermediate_size=24, max_position_embeddings=64, num_key_value_heads=1),
    "gpt_oss": lambda: GptOssConfig(
        **{**_LLAMA, "num_hidden_layers": 2}, num_local_experts=2, num_experts_per_tok=1, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"], rope_scaling=None,
    ),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=2
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_LLAMA, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip


def model_of(shape: str, seed: int = 0):
    """Return a tiny model with large weights, so that the highest logits differ clearly."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(SHAPES[shape]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def prompts(number: int = 6, max_length: int = 20, seed: int = 0) -> list[list[int]]:
    """Return random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length, (number,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def make_scheduler(model, slots: int = 4, context: int = 64, **more) -> Scheduler:
    return Scheduler(model, SlotLimits(slots, context), **more)


class ResponseCollector:
    """A callback that collects the outputs of a request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.filled = None
        self.reason: EndReason | None = None
        self.error = None

    def __call__(self, output: StepOutput) -> None:
        assert self.reason is None, "output after the end of the request"
        assert (output.filled is not None) == (self.filled is None and output.reason in (None, "length")) or output.ids
        self.ids += output.ids
        self.logprobs += output.logprobs
        self.filled = output.filled or self.filled
        self.reason, self.error = output.reason, output.error


def generate_responses(loop: Scheduler, requests: Sequence[GenerationRequest]) -> list[ResponseCollector]:
    """Submit all requests and run them to completion."""
    result = [ResponseCollector() for _ in requests]
    for request, collector in zip(requests, result, strict=True):
        loop.submit(request, collector)
    while loop.turn():
        pass
    return result


def generate_alone(model, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """Return the greedy response of transformers' ``generate``."""
    stops = {"eos_token_id": list(stop_ids) or None, "pad_token_id": 0}
    with torch.no_grad():
        output = model.generate(
            input_ids=torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_new_tokens, do_sample=False, **stops,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()
