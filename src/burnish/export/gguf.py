"""Write a GGUF file of an exported folder, for llama.cpp and programs based on it.

In:  the folder that ``burnish export`` wrote. Out: ``<name>.gguf`` in it. There are two methods:

- with ``llama_cpp``, a source tree or an installation of llama.cpp: its own converter and quantizer, as processes;
- without: this module, with the library ``gguf`` (extra ``gguf``), for the architectures llama, mistral, qwen2 and
  qwen3 with the tokenizers of ``gguf_tokens.py``, as f32, f16, bf16, q8_0 and similar types. Other types (``q4_k_m``)
  are created from this file by the quantizer of the library ``llama-cpp-python`` (extra ``llama``), in a separate
  process.

Refuses: other architectures and tokenizers; the error suggests the first method. Afterwards tokens, chat template and
stop token of the file are compared with those of the folder.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from burnish.config.errors import MissingExtraError, Problem, UserError, install_command
from burnish.export.gguf_tokens import add_tokenizer, tokenizer_kind
from burnish.models.save import whole_or_nothing
from burnish.run.plan.options import RunOptions
from burnish.utils.tensor_files import read_header
from burnish.utils.work import progress

EXTRA = "gguf"
ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type -> llama.cpp's name of the architecture."""
_ACTIVATIONS: Final = ("silu", "swish")
DIRECT_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
"""Types that the library ``gguf`` can write. K-quants require llama.cpp."""
LLAMA_EXTRA: Final = "llama"
_QUANTIZE: Final = """
import sys
import llama_cpp
name = "LLAMA_FTYPE_MOSTLY_" + sys.argv[3].upper()
if not hasattr(llama_cpp, name):
    raise SystemExit(f"llama.cpp has no type {sys.argv[3]}.")
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype = getattr(llama_cpp, name)
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), parameters))
"""
WRITING: Final = "Writing the GGUF file"


def gguf_file(folder: Path, options: RunOptions) -> Path:
    """The path of the GGUF file in an exported folder."""
    return folder / f"{folder.resolve().name}-{options.export_gguf_type}.gguf"


def write_gguf(folder: Path, target: Path, options: RunOptions) -> list[str]:
    """Write the file, or nothing if that fails. Returns notes for the user.

    Raises:
        UserError: if this method does not support the model; before anything is written.
        RuntimeError: if llama.cpp fails.
    """
    kind, incomplete = options.export_gguf_type, target.with_name(f".incomplete-{target.name}")
    with whole_or_nothing(folder):
        if options.llama_cpp:
            with progress(WRITING):
                _through_llama_cpp(folder, incomplete, kind, Path(options.llama_cpp))
        elif kind in DIRECT_TYPES:
            _write_gguf_directly(folder, incomplete, kind)
        else:
            first = incomplete.with_suffix(".f16.gguf")
            _write_gguf_directly(folder, first, "f16")
            with progress(f"Quantizing the GGUF file to {kind}"):
                _run([sys.executable, "-c", _QUANTIZE, str(first), str(incomplete), kind])
            first.unlink()
        compare_gguf(folder, incomplete)
        incomplete.replace(target)
    size = target.stat().st_size / 2**20
    return [f"{target} ({size:,.0f} MiB): tokens, chat template and EOS token match those of the exported model."]


def check_gguf(config: Any, tokenizer: Any, options: RunOptions) -> Iterator[Problem]:
    """Yield what prevents writing the file: a missing library or program, or, without llama.cpp, a model or a
    tokenizer that this module does not support."""
    if getattr(config, "vision_config", None) is not None:
        what = "export_format: gguf does not support vision-language models. "
        what += f'Received: a model of type "{config.model_type}".'
        why = "llama.cpp expects its vision tower in a second file (mmproj), which burnish does not write."
        yield Problem(what, why=why, remedy="Remove export_format.", option="export_format")
        return
    kind, model_type = options.export_gguf_type, config.model_type
    activation = getattr(config, "hidden_act", None)
    if model_type in ARCHITECTURES and activation not in _ACTIVATIONS:
        what = f'llama.cpp computes models of type "{model_type}" with silu. Received: "hidden_act" {activation}.'
        yield Problem(what, remedy="Remove export_format.", option="export_format")
        return
    try:
        _library()
        if options.llama_cpp:
            _programs(Path(options.llama_cpp), kind)
            return
    except UserError as error:
        yield from error.problems
        return
    remedy = "Set llama_cpp to a checkout or an installation of llama.cpp to use its converter."
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        what = f'export_format: gguf supports {known}. Received: a model of type "{model_type}".'
        yield Problem(what, remedy=remedy, option="export_format")
        return
    if kind not in DIRECT_TYPES and not find_spec("llama_cpp"):
        what = f'"export_gguf_type" {kind} requires the quantizer of llama.cpp.'
        install = f"Install it with {install_command(LLAMA_EXTRA)}, or set llama_cpp to a build of llama.cpp."
        available = f"Available without it: {', '.join(DIRECT_TYPES)}."
        yield Problem(what, remedy=f"{install} {available}", option="export_gguf_type")
        return
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        yield Problem(
            f"GGUF export without llama.cpp does not support rotary embeddings of type {rope['rope_type']}.",
            remedy=remedy,
        )
        return
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        yield Problem("GGUF export without llama.cpp requires a tokenizer with a tokenizer.json.", remedy=remedy)
        return
    try:
        tokenizer_kind(json.loads(tokenizer.backend_tokenizer.to_str()))
    except UserError as error:
        yield from error.problems
        return


# --- llama.cpp --------------------------------------------------------------------------------------------------------


_CONVERTER_TYPES: Final = ("f32", "f16", "bf16", "q8_0")
"""Types that llama.cpp's converter writes itself."""


def _programs(place: Path, kind: str) -> tuple[Path, Path | None]:
    """llama.cpp's converter in ``place``, and its quantizer if the type needs it.

    Raises:
        UserError: if one of them is missing.
    """
    converters = (place / "convert_hf_to_gguf.py", place / "bin" / "convert_hf_to_gguf.py")
    converter = next((path for path in converters if path.is_file()), None)
    if converter is None:
        raise UserError(f'"llama_cpp" "{place}" does not contain convert_hf_to_gguf.py.', option="llama_cpp")
    if kind in _CONVERTER_TYPES:
        return converter, None
    folders = (place, place / "build" / "bin", place / "bin")
    quantizer = next((path for each in folders if (path := each / "llama-quantize").is_file()), None)
    if quantizer is None:
        what = f'"llama_cpp" "{place}" does not contain llama-quantize.'
        raise UserError(what, remedy="Build llama.cpp first.", option="llama_cpp")
    return converter, quantizer


def _through_llama_cpp(folder: Path, target: Path, kind: str, place: Path) -> None:
    converter, quantizer = _programs(place, kind)
    first = target if quantizer is None else target.with_suffix(".f16.gguf")
    outtype = kind if quantizer is None else "f16"
    _run([sys.executable, str(converter), str(folder), "--outfile", str(first), "--outtype", outtype])
    if quantizer is not None:
        _run([str(quantizer), str(first), str(target), kind])
        first.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (an argument list)
    if done.returncode:
        last = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise RuntimeError(f"{Path(command[0]).name} failed with exit status {done.returncode}:\n  {last}")


# --- without llama.cpp ------------------------------------------------------------------------------------------------


def _write_gguf_directly(folder: Path, target: Path, kind: str) -> None:
    gguf = _library()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = tokenizer_kind(tokenizer_json)
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]])
    _add_shape(writer, config, folder.resolve().name, kind)
    add_tokenizer(writer, folder, tokenizer_json, tokens, config["vocab_size"])
    paths = sorted(folder.glob("*.safetensors"))
    weights = [(path, name) for path in paths for name in read_header(path)]
    with progress(WRITING, len(weights), "weights") as advance:
        for name, tensor in _tensors(weights, config):
            _add_tensor(gguf, writer, name, tensor, kind)
            advance(1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "export_format: gguf", EXTRA, option="export_format") from None
    return gguf


def _add_shape(writer: Any, config: dict[str, Any], name: str, kind: str) -> None:
    gguf = _library()
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])


def _tensors(weights: Sequence[tuple[Path, str]], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the GGUF file, weight). ``weights`` lists the file and the name of each tensor."""
    from safetensors import safe_open

    gguf = _library()
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]].upper()], config["num_hidden_layers"]
    )
    permuted = _rotation_order(config)
    for path, name in weights:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f'the weight "{name}" has no counterpart in a GGUF file of this architecture.')
        with safe_open(path, framework="pt") as file:
            yield found, permuted(name, file.get_tensor(name))


def _rotation_order(config: dict[str, Any]) -> Callable[[str, Tensor], Tensor]:
    """A function that reorders the rows of queries and keys for llama.cpp's llama architecture. Its rotary positions
    rotate adjacent pairs, while Hugging Face's files have the two halves of a head.
    """
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or heads

    def turn(name: str, weight: Tensor) -> Tensor:
        if ARCHITECTURES[config["model_type"]] != "llama" or (".q_proj." not in name and ".k_proj." not in name):
            return weight
        number = heads if ".q_proj." in name else keys
        return (
            weight.reshape(number, 2, weight.shape[0] // number // 2, *weight.shape[1:])
            .transpose(1, 2)
            .reshape_as(weight)
        )

    return turn


def _add_tensor(gguf: Any, writer: Any, name: str, tensor: Tensor, kind: str) -> None:
    """Add a tensor. Vectors, and matrices whose row length is not a multiple of the type's block size, stay float32."""
    numbers = tensor.detach().to(torch.float32).numpy()
    target_type = gguf.GGMLQuantizationType[kind.upper()]
    block = gguf.GGML_QUANT_SIZES[target_type][0]
    if tensor.ndim < 2 or kind == "f32" or numbers.shape[-1] % block:
        writer.add_tensor(name, numbers)
        return
    writer.add_tensor(name, gguf.quants.quantize(numbers, target_type), raw_dtype=target_type)


# --- afterwards -------------------------------------------------------------------------------------------------------


def compare_gguf(folder: Path, target: Path) -> None:
    """Compare tokens, chat template and stop token of the file with those of the folder.

    Raises:
        RuntimeError: if they differ.
    """
    from burnish.models.tokens import tokenizer_in

    gguf = _library()
    fields = gguf.GGUFReader(target).fields
    tokenizer = tokenizer_in(folder)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    differs = [
        word for word, number in tokenizer.get_vocab().items() if number >= len(tokens) or tokens[number] != word
    ]
    written = fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else None
    ends = fields["tokenizer.ggml.eos_token_id"].contents()
    if differs or written != tokenizer.chat_template or ends != tokenizer.eos_token_id:
        what = f"tokens ({', '.join(differs[:3])})" if differs else "the chat template or the EOS token"
        raise RuntimeError(f"{target} differs from {folder}: {what}.")
