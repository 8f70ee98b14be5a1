"""Scores of texts by a reward model, computed at the last token of each text.

A reward model generates no text: its engine rejects generation requests and only reports its status.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from burnish.config.errors import UserError
from burnish.inference.types import Closed, EngineFacts, GenerationRequest, OutputCallback, RequestHandle
from burnish.kernels.probe import unwrap_peft
from burnish.losses.reward import RewardHead

BATCH_SIZE = 8
"""Number of texts per forward pass."""
NO_ANSWERS = "This is a reward model: it returns scores and does not generate text."


class ScoreEngine:
    """``types.InferenceEngine`` for a reward model.

    Args:
        model: a transformers model, with or without adapters, in evaluation mode.
        head: reward head, (N, H) -> (N,).
        context: maximum number of tokens of a text.
    """

    def __init__(self, model: nn.Module, head: RewardHead, context: int) -> None:
        self.model, self.head, self.context = model, head, context
        self._is_closed = False
        self._tokens = 0
        self._lock = threading.Lock()

    def scores(self, texts: Sequence[Sequence[int]], batch_size: int = BATCH_SIZE) -> list[float]:
        """Return the score of each text, in order. Texts of similar length are batched.

        Args:
            texts: token ids; each text has at least one and at most ``context``.
            batch_size: number of texts per forward pass.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found = [0.0] * len(texts)
        with self._lock, torch.inference_mode():
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                for index, score in zip(chosen, self._of([texts[i] for i in chosen]).tolist(), strict=True):
                    found[index] = score
            self._tokens += sum(map(len, texts))
        return found

    def _of(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return (B,) scores in float32. With right padding, no token of a text attends to padding."""
        device = next(self.model.parameters()).device
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)  # (B, T)
        last = torch.tensor([len(text) - 1 for text in texts], device=device)
        mask = (torch.arange(ids.shape[1], device=device) <= last[:, None]).long()
        hidden: Tensor = unwrap_peft(self.model).base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        scores: Tensor = self.head(hidden[torch.arange(len(texts), device=device), last])
        return scores

    def submit(self, request: GenerationRequest, callback: OutputCallback) -> RequestHandle:
        raise Closed("closed") if self._is_closed else UserError(NO_ANSWERS)

    def cancel(self, handle: RequestHandle) -> None:
        return None

    def close(self, drain_s: float = 0.0) -> None:
        self._is_closed = True

    def facts(self) -> EngineFacts:
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return EngineFacts(
            "scores", BATCH_SIZE, 0, 0, self.context, memory_bytes={"weights": weights}, prompt_tokens=self._tokens
        )
