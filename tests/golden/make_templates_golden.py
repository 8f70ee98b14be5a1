"""Makes ``templates.json`` here: what LLaMA-Factory gives for the conversations below, under every named template.

    python tests/golden/make_templates_golden.py        (with llamafactory 0.9.5 importable; run once, not by the tests)

Only its formatters, template classes and supervised processor run; the table of templates is burnish's own, which
another test holds against LLaMA-Factory's. Rows are kept as hashes, tool texts in full. What burnish does otherwise
on purpose is left out: granite4's observation and llama3's date (docs/decisions/0010-chat-templates-as-data.md).
"""

# ruff: noqa: E402  llamafactory's package imports need stand-ins first
import importlib
import importlib.util
import json
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parents[1] / "src"))

from burnish.data.chat.table import Token, table
from template_cases import CALLS, CONVERSATIONS, OPTIONS, RANDOM_CASES, TOOLS, byte_tokenizer

CONVERSATIONS = CONVERSATIONS | RANDOM_CASES


class Media:
    """Stands in for LLaMA-Factory's handling of images, which text does not meet."""

    def process_messages(self, messages, *_):
        return messages

    def process_token_ids(self, input_ids, labels, *_):
        return input_ids, labels


def stand_in(name, **members):
    module = ModuleType(f"llamafactory.{name}".rstrip("."))
    module.__dict__.update(members)
    module.__path__ = [str(ROOT / name.replace(".", "/"))]
    sys.modules[module.__name__] = module


def load(name):
    return importlib.import_module(f"llamafactory.data.{name}")


ROOT = Path(importlib.util.find_spec("llamafactory").submodule_search_locations[0])
quiet = SimpleNamespace(get_logger=lambda _: SimpleNamespace(info_rank0=lambda *_: None, warning_rank0=lambda *_: None))
for name, members in {
    "": {},
    "extras": {"logging": quiet},
    "extras.logging": vars(quiet),
    "extras.constants": {"IGNORE_INDEX": -100},
    "data": {},
    "data.processor": {},
    "data.mm_plugin": {"get_mm_plugin": lambda *_, **__: Media()},
}.items():
    stand_in(name, **members)
roles = SimpleNamespace(
    USER="user", ASSISTANT="assistant", SYSTEM="system", FUNCTION="function", OBSERVATION="observation"
)
stand_in("data.data_utils", Role=roles, SLOTS=list)
tool_utils, formatter, template, supervised = map(load, ("tool_utils", "formatter", "template", "processor.supervised"))


PLAIN_ROLES = ("user", "assistant", "system", "observation")
SAME_NAMES = ("default_system", "thought_words", "tool_call_words", "efficient_eos", "replace_eos")


def slots(row):
    return [slot if isinstance(slot, str) else native(slot) for slot in row]


def native(token: Token):
    return {f"{token.kind}_token"} if token.kind in ("bos", "eos") else {"token": token.name}


def build(spec, enable_thinking=True, preserve_thinking=False, **_):
    kinds = {(False, False): "Template", (True, False): "Llama2Template", (False, True): "ReasoningTemplate"}
    kind = (
        "Glm47ReasoningTemplate"
        if spec.empty_thought == spec.thought_words[1]
        else kinds[spec.system_in_user, spec.reasoning]
    )
    tools = formatter.StringFormatter(["<|tool|>{{content}}<|/tool|>"])
    if spec.tool_list_format != "phi4_mini":
        tools = formatter.ToolFormatter(tool_format=spec.tool_list_format)
    plain = {f"format_{role}": formatter.StringFormatter(slots(getattr(spec, role))) for role in PLAIN_ROLES}
    return getattr(template, kind)(
        **plain,
        **{name: getattr(spec, name) for name in SAME_NAMES},
        format_function=formatter.FunctionFormatter(slots(spec.function), tool_format=spec.tool_format),
        format_tools=tools,
        format_prefix=formatter.EmptyFormatter(slots(spec.prefix)),
        stop_words=list(spec.stop_words),
        replace_jinja_template=False,
        enable_thinking=enable_thinking,
        preserve_thinking=preserve_thinking,
        mm_plugin=Media(),
    )


def row_of(spec, tokenizer, case, options):
    """(ids, labels), or None where LLaMA-Factory gives up on the record."""
    arguments = SimpleNamespace(**{"cutoff_len": 2048, "train_on_prompt": False, "mask_history": False} | options)
    processor = supervised.SupervisedDatasetProcessor(build(spec, **options), tokenizer, None, arguments)
    messages = [{"role": role, "content": content} for role, content in case["messages"]]
    try:
        return processor._encode_data_example(messages[:-1], messages[-1:], case["system"], case["tools"], [], [], [])
    except (RuntimeError, ValueError, KeyError):
        return None


def hashes():
    """Template -> the cases left out, and a hash of all other rows per set of options ("-" where they clash)."""
    found = {}
    own = json.loads((Path(__file__).parent / "own_templates.json").read_text(encoding="utf-8"))
    for name, spec in table().items():
        if name in own:
            continue
        tokenizer = byte_tokenizer()
        build(spec).fix_special_tokens(tokenizer)
        rows = {
            case: [row_of(spec, tokenizer, CONVERSATIONS[case], options) for options in OPTIONS]
            for case in CONVERSATIONS
            if not differs(spec, CONVERSATIONS[case])
        }
        done = {case: made for case, made in rows.items() if None not in made}
        hashed = [
            sha256(json.dumps([made[at] for made in done.values()]).encode()).hexdigest()[:8]
            for at in range(len(OPTIONS))
        ]
        for at, options in enumerate(OPTIONS):
            if options.get("train_on_prompt") and spec.efficient_eos:
                hashed[at] = "-"
        without = [case for case in CONVERSATIONS if case not in done]
        found[name] = {"without": ", ".join(without), "rows": " ".join(hashed)}
    return found


def differs(spec, case):
    """Left out: what burnish does otherwise on purpose, and moss_vl's own way, which is younger than 0.9.5."""
    own_way = spec.name == "granite4" or spec.tool_format == "llama3" or (spec.tools_open_system and not case["system"])
    return bool(case["tools"]) and own_way


def tool_texts():
    texts = {}
    for name, tools in tool_utils.TOOLS.items():
        if name != "llama3":
            texts[f"{name} tools"] = [tools.tool_formatter(listed) for listed in TOOLS]
        calls = [
            [tool_utils.FunctionCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in turn]
            for turn in CALLS
        ]
        texts[f"{name} calls"] = [tools.function_formatter(turn) for turn in calls if len(turn) == 1 or name != "glm4"]
    return texts


golden = {"made with": "llamafactory 0.9.5", "rows": hashes(), "tool texts": tool_texts()}
(HERE / "templates.json").write_text(json.dumps(golden, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
