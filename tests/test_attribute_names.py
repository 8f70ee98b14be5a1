"""Attributes of tokenizers, configs and models exist.

Type checkers accept any attribute there, because classes of transformers define ``__getattr__``, and models are
``nn.Module`` or ``Any``. The test recognizes an object by the name of its variable.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import transformers
from peft import LoraConfig, PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import GenerationMixin

SOURCE = Path(__file__).parents[1] / "src" / "burnish"
DECLARED = re.compile(r"^    (?:self\.)?(\w+)\s*[:=]|self\.(\w+)\s*[:=]", re.MULTILINE)

OTHERS = {
    "tokenizer": {"new_tokens", "trained_tokens", "legacy"},  # set by models/tokens.py; an attribute of Llama's class
    "config": {
        "get", "items", "is_file", "parent",  # mappings and paths
        "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler",  # accelerate
        "gradient_accumulation_kwargs",
        "auto_map", "transformers_weights",  # keys of config.json
        "orth_reg_weight",  # AdaLoRA
    },
    "model": {
        "module", "original", "no_sync", "_orig_mod",  # wrappers
        "get", "is_benchmark", "is_dir", "removesuffix", "seed",  # other objects with that name
        "quantize", "save", "score",  # gptqmodel; classifiers
        "has_new_tokens", "hf_device_map", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit",
        "quantization_method", "_weight_conversions", "_forward_hooks", "_forward_pre_hooks",
    },
    "generation_config": set(),
}  # fmt: skip
"""Further attributes that may be used, by variable name."""


@cache
def known(variable: str) -> frozenset[str]:
    """Return the attributes that an object of this name may have."""
    root = Path(transformers.__file__).parent
    generation = {*dir(GenerationConfig), *vars(GenerationConfig())}
    special = PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
    files = [root / "configuration_utils.py", *root.glob("models/*/configuration_*.py")]
    result = {
        "tokenizer": lambda: {
            *dir(PreTrainedTokenizerFast), *special, *(f"{name}_id" for name in special),
            *declared_in(root / "tokenization_utils_base.py"),
        },
        "config": lambda: {*dir(LoraConfig()), *generation, *(name for file in files for name in declared_in(file)),
                           *dir(transformers.PreTrainedConfig)},
        "model": lambda: {*dir(PreTrainedModel), *dir(GenerationMixin), *dir(PeftModel), "config", "generation_config",
                          "peft_config", "active_adapter", "training"},
        "generation_config": lambda: generation,
    }  # fmt: skip
    return frozenset(result[variable]() | OTHERS[variable])


def declared_in(file: Path) -> set[str]:
    return {name for pair in DECLARED.findall(file.read_text("utf-8")) for name in pair if name}


def uses(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield (variable, attribute, line) of each ``variable.attribute`` and ``getattr(variable, "attribute")``."""
    for node in ast.walk(tree):
        owner, name = None, None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            owner, name = node.args[0], getattr(node.args[1], "value", None)
        variable = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if variable in OTHERS and isinstance(name, str):
            yield variable, name, node.lineno


def unknown_attributes(source: str) -> list[str]:
    result = uses(ast.parse(source))
    return [f"line {line}: {variable}.{name}" for variable, name, line in result if name not in known(variable)]


def test_attributes_of_tokenizers_configs_and_models_exist():
    result = {
        file.relative_to(SOURCE).as_posix(): unknown_attributes(file.read_text("utf-8"))
        for file in SOURCE.rglob("*.py")
    }
    assert not {file: names for file, names in result.items() if names}, "Correct the name, or add it to OTHERS."


@pytest.mark.parametrize("source", [
    "config.modle_type", "model.config.use_cach = True", "tokenizer.pad_tokn", "self.tokenizer.get_aded_vocab()",
    "tokenizer.convert_token_to_ids(1)", "model.peft_confg", "model.disable_adaptr()", "model.generation_config.top_kk",
    "getattr(config, 'num_atention_heads', 0)", "model.resize_token_embedings(3)",
])  # fmt: skip
def test_misspelled_attribute_is_detected(source):
    assert unknown_attributes(source)
