"""``adapter_config.json``: what a LoRA adapter is, in peft's format.

In and out: the JSON that peft writes and reads (https://huggingface.co/docs/peft, LoraConfig). Refuses: adapters that
do something burnish's LoRA layer does not, by the name of what they do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from burnish.adapters.lora_layer import LoraSettings
from burnish.core.errors import Problem, UserError
from burnish.core.tensor_files import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PISSA = re.compile(r"pissa(?:_niter_(\d+))?$")
# What these start from is left out of the base weight, or they are more than a sum of low-rank updates.
_OTHER_STARTS = ("olora", "corda", "loftq", "lora_ga", "mica")
_OTHER_LAYERS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
    "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip


@dataclass(frozen=True)
class LoraConfig:
    """One adapter.

    Args:
        settings: rank, scale and kind in every layer that the patterns do not name.
        target_modules: full paths or ends of paths.
        modules_to_save: modules trained whole beside it, as ends of paths.
        rank_pattern, alpha_pattern: end of a path, or a regular expression for one -> its own rank or alpha.
        base_model: what it was trained on.
    """

    settings: LoraSettings
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_model: str | None = None
    fan_in_fan_out: bool = False

    def at(self, path: str) -> LoraSettings:
        """The settings in the layer at ``path``."""
        rank = _by_pattern(self.rank_pattern, path, self.settings.rank)
        alpha = _by_pattern(self.alpha_pattern, path, self.settings.alpha)
        return replace(self.settings, rank=int(rank), alpha=alpha)

    def to_json(self) -> dict[str, Any]:
        """As peft reads it. An adapter that began as PiSSA is described as what is saved of it: plain LoRA of twice the
        rank and the same scale (``LoraLayer.state``)."""
        settings = self.settings
        rank, alpha, use_rslora = settings.rank, settings.alpha, settings.use_rslora
        if settings.pissa is not None:
            rank, alpha, use_rslora = 2 * rank, settings.scaling * 2 * rank, False
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "revision": None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": settings.dropout,
            "use_rslora": use_rslora,
            "use_dora": settings.use_dora,
            "lora_bias": settings.use_bias,
            "bias": "none",
            "init_lora_weights": True,
            "fan_in_fan_out": self.fan_in_fan_out,
            "target_modules": sorted(self.target_modules),
            "modules_to_save": sorted(self.modules_to_save) or None,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
        }

    def write(self, folder: Path) -> None:
        text = json.dumps(self.to_json(), indent=2, sort_keys=True)
        (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """The adapter in ``folder``.

        Raises:
            UserError: where there is none, or one that only peft can run.
        """
        path = folder / CONFIG_NAME
        if not path.is_file():
            raise UserError(_no_adapter(folder))
        raw = read_json(path)
        other = _not_plain_lora(raw)
        if other:
            raise UserError(
                Problem(
                    f"this adapter uses {other}, which burnish's LoRA layer does not do.",
                    where=str(path),
                    remedy="Set finetuning_type: peft to run it through the peft library.",
                )
            )
        return cls._from_json(raw)

    @classmethod
    def _from_json(cls, raw: Mapping[str, Any]) -> LoraConfig:
        began = _PISSA.match(str(raw.get("init_lora_weights")))
        targets = raw.get("target_modules") or ()
        return cls(
            settings=LoraSettings(
                rank=raw.get("r", 8),
                alpha=raw.get("lora_alpha", 8),
                dropout=raw.get("lora_dropout", 0.0),
                use_rslora=raw.get("use_rslora", False),
                use_dora=raw.get("use_dora", False),
                pissa=int(began[1] or -1) if began else None,
                use_bias=raw.get("lora_bias", False),
            ),
            target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
            modules_to_save=tuple(raw.get("modules_to_save") or ()),
            rank_pattern=raw.get("rank_pattern") or {},
            alpha_pattern=raw.get("alpha_pattern") or {},
            base_model=raw.get("base_model_name_or_path"),
        )


def _by_pattern(pattern: Mapping[str, float], path: str, default: float) -> float:
    """The value of the first key that is ``path``, its end, or a regular expression for it."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def _not_plain_lora(raw: Mapping[str, Any]) -> str:
    """What an adapter does beyond LoRA, or the empty string."""
    if raw.get("peft_type") != "LORA":
        return f"the method {raw.get('peft_type')}"
    if raw.get("bias", "none") != "none":
        return f"bias: {raw['bias']}"
    if raw.get("init_lora_weights") in _OTHER_STARTS:
        return f"init_lora_weights: {raw['init_lora_weights']}"
    if _PISSA.match(str(raw.get("init_lora_weights"))) and (raw.get("rank_pattern") or raw.get("alpha_pattern")):
        return "PiSSA with a rank_pattern or alpha_pattern"
    return next((name for name in _OTHER_LAYERS if raw.get(name)), "")


def _no_adapter(folder: Path) -> Problem:
    if not folder.is_dir():
        return Problem(
            f'adapter_name_or_path "{folder}" is no folder.', remedy="Give the folder that holds the adapter."
        )
    what = "a whole model" if (folder / "config.json").is_file() else "no adapter"
    return Problem(
        f"this folder holds {what}: it has no {CONFIG_NAME}.",
        where=str(folder),
        remedy="Give a model as model_name_or_path, and an adapter as adapter_name_or_path.",
    )
