"""Test readers with random inputs from hypothesis: each is accepted or rejected with an error message, within a time
limit.

    python tests/fuzz.py --inputs 100000 --seed 0        # make fuzz

The inputs are configurations, ``dataset_info.json``, records, templates, tool calls, manifests, rows and adapters. They
are read by the functions that the commands use.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import _dynamo  # noqa: F401 - takes seconds; the time limit must not interrupt this import

import burnish
from burnish.adapters.lora_fit import read_adapter_config as read_adapter
from burnish.checkpoint.manifest import integrity_errors
from burnish.config.errors import UserError
from burnish.config.options import RawValue, specs
from burnish.data.chat.rendering import Conversation, render
from burnish.data.chat.tools.tool_formats import describe_tools
from burnish.data.chat.tools.tools import ToolError, read_calls, read_tools
from burnish.data.reading.files import read_records
from burnish.data.rows.store import read_rows_manifest
from burnish.data.sets.dataset_info import find_sources
from burnish.loop.state import TrainerState
from burnish.run.plan.config_files import read_config
from burnish.run.plan.plan import RunOptions, plan
from burnish.run.recovery.resume import read_finished
from burnish.utils.tensor_files import read_header

SECONDS = 5
"""The limit for one input, in CPU seconds, so that it does not depend on the load of the machine."""
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NUMBERS = st.one_of(st.integers(-(10**20), 10**20), st.floats(), st.booleans())
JSON = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)
BYTES = st.one_of(st.binary(max_size=120), JSON.map(lambda value: json.dumps(value).encode()))


def dict_with(*names: str) -> st.SearchStrategy[Any]:
    """Return a strategy of objects with some of these keys and with random ones."""
    return st.dictionaries(st.one_of(st.sampled_from(names), TEXT), JSON, max_size=6)


OPTIONS = st.dictionaries(
    st.one_of(st.sampled_from(sorted(specs(RunOptions))), TEXT), st.one_of(JSON, TEXT), max_size=5
)
YAML = st.one_of(
    st.text("abc: -[]{}&*!|>'\"\n\t#<,1", max_size=80), BYTES.map(lambda raw: raw.decode("latin-1")),
    OPTIONS.map(lambda result: "\n".join(f"{key}: {json.dumps(value)}" for key, value in result.items())),
)  # fmt: skip
JINJA = st.text("{}%# ()[]'\"|.*ab1=", max_size=60)
CALL = st.one_of(dict_with("name", "arguments"), st.lists(dict_with("name", "arguments"), max_size=3)).map(json.dumps)
TOOLS = st.one_of(JSON, st.lists(dict_with("name", "type", "function", "parameters"), max_size=3)).map(json.dumps)


def _write(name: str, raw: bytes | str) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass"))
    return path


def _config(text: str) -> None:
    read_config(_write("run.yaml", text))


def _options(result: dict[str, Any]) -> None:
    plan({name: RawValue(value, "here") for name, value in result.items()})


def _records(raw: bytes, suffix: str) -> None:
    for number, _ in enumerate(read_records(_write(f"rows{suffix}", raw))):
        assert number < 1000


def _info(raw: Any) -> None:
    _write("info/dataset_info.json", raw if isinstance(raw, bytes) else json.dumps(raw))
    find_sources(["a"], "info", lambda name: {}, {}, "dataset")


def _calls(text: str) -> None:
    read_calls(text, ("<think>", "</think>"), ("<tool_call>", "</tool_call>"))


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(burnish.__file__).parent / "demo" / "model")


def _template(text: str) -> None:
    render(_tokenizer(), [Conversation([{"role": "user", "content": "x"}])], text)


def _tools(text: str, name: str) -> None:
    read_tools(text)
    describe_tools(text, name)


def _manifest(raw: bytes) -> None:
    _write("checkpoint/manifest.json", raw)
    assert integrity_errors(Path("checkpoint"))


def _rows(raw: bytes) -> None:
    _write("stored/rows.json", raw)
    read_rows_manifest(Path("stored"))


def _adapter(raw: Any) -> None:
    _write("adapter/adapter_config.json", raw if isinstance(raw, bytes) else json.dumps(raw))
    read_adapter(Path("adapter"))


def _state(raw: bytes) -> None:
    TrainerState.load_from_json(str(_write("state.json", raw)))


def _finished(raw: bytes) -> None:
    read_finished(_write("out/.finished.json", raw).parent)


def _weights(raw: bytes) -> None:
    path = _write("weights.safetensors", len(raw).to_bytes(8, "little") + raw + bytes(8))
    read_header(path)
    load_file(path)


ADAPTER_KEYS = ("r", "lora_alpha", "peft_type", "target_modules", "lora_dropout", "rank_pattern", "bias")
TENSOR = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "I8", "F33", ""]), "shape": st.lists(st.integers(0, 4), max_size=3),
     "data_offsets": st.one_of(st.just([0, 8]), st.lists(st.integers(0, 9), max_size=3))},
)  # fmt: skip
HEADERS = st.dictionaries(st.one_of(st.just("__metadata__"), TEXT), st.one_of(TENSOR, TENSOR, JSON), max_size=3)
DATA_SETS = st.fixed_dictionaries({"a": dict_with("file_name", "columns", "tags", "formatting")})
READERS: dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = {
    "configuration": (_config, (YAML,)),
    "options": (_options, (OPTIONS,)),
    "records": (_records, (BYTES, st.sampled_from([".json", ".jsonl", ".csv", ".txt", ".parquet", ".arrow"]))),
    "dataset_info": (_info, (st.one_of(BYTES, dict_with("a"), DATA_SETS),)),
    "templates": (_template, (JINJA,)),
    "tool calls": (_calls, (st.one_of(CALL, TEXT),)),
    "tools": (_tools, (st.one_of(TOOLS, TEXT), st.sampled_from(["default", "qwen", "glm4", "llama3", "mistral"]))),
    "manifests": (_manifest, (BYTES,)),
    "rows": (_rows, (st.one_of(BYTES, dict_with("layout", "files", "sha256").map(lambda v: json.dumps(v).encode())),)),
    "adapters": (_adapter, (st.one_of(BYTES, dict_with(*ADAPTER_KEYS)),)),
    "states": (_state, (BYTES,)),
    "finished runs": (_finished, (BYTES,)),
    "weights": (_weights, (st.one_of(BYTES, HEADERS.map(lambda value: json.dumps(value).encode())),)),
}  # fmt: skip


def _too_long(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"an input took longer than {SECONDS} s")


def fuzz(name: str, num_inputs: int, first: int = 0) -> None:
    """Read random inputs with one reader, in the current folder. Only errors with a message may be raised."""
    read, strategies = READERS[name]

    @seed(first)
    @settings(max_examples=num_inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*strategies))
    def check_input(inputs: tuple[Any, ...]) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            read(*inputs)
        except (UserError, ToolError):
            return
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    previous_handler = signal.signal(signal.SIGPROF, _too_long)
    try:
        check_input()
    finally:
        signal.signal(signal.SIGPROF, previous_handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    requested = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        count = ceil(requested.inputs / len(READERS))
        for name in READERS:
            fuzz(name, count, requested.seed)
            print(f"{name}: {count:,} inputs", flush=True)
    print(f"{count * len(READERS):,} inputs, seed {requested.seed}: each ended well or in a sentence of burnish's own.")


if __name__ == "__main__":
    sys.exit(main())
