"""Checks of the architecture on syntax trees: import layers, one importing package per library, no imports at start,
options that one component reads and none changes."""

import ast
import gc
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "burnish"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def tree_of(file: Path) -> ast.Module:
    """Return the syntax tree of a file. It is shared by all tests, which must not change it."""
    gc.disable()  # Python below 3.11.8 fails if garbage collection runs code during parsing (gh-106905)
    try:
        return ast.parse(text_of(file))
    finally:
        gc.enable()


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


# From the top layer to the bottom; a package may import from lower layers and from itself.
LAYERS = (
    {"cli"},
    {"serve"},
    {"trainer", "explain", "export", "demo"},
    {"run"},
    {"rollouts"},
    {"inference"},
    {"losses", "optim", "adapters", "models", "data", "report"},
    {"kernels", "parallel"},
    {"loop"},
    {"checkpoint"},
    {"utils"},
    {"config"},
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
# Modules of the root folder -> the package whose layer they belong to. Public and re-exported names belong to none.
ROOT_FILES = {"__main__": "cli", "train": "cli", "cli": "cli", "__init__": None, "reexports": None, "rewards": None}

# The files or packages that may import a library.
IMPORTERS = {
    "accelerate": {"parallel/accelerate.py"},
    "deepspeed": {"parallel/deepspeed/parallel.py"},
    "datasets": {"data/sets/sources.py", "data/reading/record_index.py"},
    # Besides models and trainer: transformers' optimizer, schedule and callbacks are used unchanged, and the demo
    # loads the saved model as any program would.
    "transformers": {
        "models",
        "trainer",
        "optim/adafactor.py",
        "optim/builtin.py",
        "report/trackers.py",
        "demo/command.py",
        "demo/images.py",
        "inference/cache.py",
        "data/chat/render_worker.py",
    },
    "peft": {"adapters/peft.py", "adapters/lora.py", "adapters/lora_model.py", "adapters/lora_fit.py"},
    "gptqmodel": {"models/quantization/export.py"},
    "bitsandbytes": {"models", "optim"},
    "yaml": {"report/card.py", "run/plan/config_files.py", "data/chat/choose.py", "models/tokens.py"},
    "rich": {"explain/view.py", "report"},
    "matplotlib": {"report"},
    "wandb": {"report/trackers.py"},
    "tensorboard": {"report/trackers.py"},
    "mlflow": {"report/trackers.py"},
    "swanlab": {"report/trackers.py"},
    # Routes use starlette; only serve/http runs the server and parses HTTP.
    "starlette": {"serve"},
    "httpx2": {"inference/remote"},
    "pydantic": {"serve/api"},
    "pydantic_core": {"serve/api"},
    "uvicorn": {"serve/http/server.py", "serve/http/connections.py"},
    "h11": {"serve/http/relay.py"},
    "jinja2": {
        "data/template_arguments.py",
        "data/chat/tools/tool_formats.py",
        "serve/page/app.py",
    },
}
FOUNDATION = {"loop", "checkpoint", "utils", "config"}
FOUNDATION_MAY_IMPORT = {"burnish", "torch", "safetensors", "numpy"} | sys.stdlib_module_names
"""safetensors is the format of checkpoints, which contain the state of numpy's random generator."""


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def package_of(file: Path) -> str | None:
    first = file.relative_to(SOURCE).parts[0]
    return ROOT_FILES[file.stem] if first.endswith(".py") else first


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Yield each module that a file imports, also inside of functions, and the line."""
    for node in nodes_of(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno}: a relative import"
            yield node.module or "", node.lineno
            if node.module == "burnish":
                yield from ((f"burnish.{alias.name}", node.lineno) for alias in node.names)


@cache
def all_imports() -> list[tuple[Path, str, int]]:
    return [(file, module, line) for file in FILES for module, line in imports(file)]


def test_packages_import_only_lower_layers() -> None:
    result = []
    for file, module, line in all_imports():
        package, target = package_of(file), (module + ".").split(".")[1]
        is_checked = module.startswith("burnish.") and target in LAYER_OF and package not in (None, target)
        if is_checked and LAYER_OF[target] <= LAYER_OF[package]:
            layers = f"{package} is in layer {LAYER_OF[package]}, {target} in layer {LAYER_OF[target]}"
            result.append(f"{name_of(file)}:{line} imports {module}: {layers}; only lower layers may be imported")
    assert not result, "\n".join(result)


def test_each_library_is_imported_only_by_its_files() -> None:
    result = []
    for file, module, line in all_imports():
        allowed = IMPORTERS.get(module.split(".")[0])
        if allowed and not any(name_of(file) == path or name_of(file).startswith(f"{path}/") for path in allowed):
            result.append(f"{name_of(file)}:{line} imports {module}; only these may: {', '.join(sorted(allowed))}")
    assert not result, "\n".join(result)


def test_loop_and_its_dependencies_import_only_torch_and_standard_library() -> None:
    in_foundation = [
        (name_of(file), line, module) for file, module, line in all_imports() if package_of(file) in FOUNDATION
    ]
    assert in_foundation
    assert not [result for result in in_foundation if result[2].split(".")[0] not in FOUNDATION_MAY_IMPORT]


def test_base_install_has_no_audio_image_web_or_hub_dependencies() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    assert "torch" in dependencies
    assert not dependencies & {"torchaudio", "torchvision", "starlette", "modelscope", "trl", "uvicorn"}


def test_every_extra_named_by_an_error_is_installable() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set()
    for file in FILES:
        constants = re.findall(r'^EXTRA = "(\w+)"', text_of(file), re.MULTILINE)
        calls = (node for node in nodes_of(tree_of(file)) if isinstance(node, ast.Call) and len(node.args) == 3)
        options = [node.args[2] for node in calls if ast.unparse(node.func) == "MissingExtraError"]
        named.update(constants, (extra.value for extra in options if isinstance(extra, ast.Constant)))
    assert {"modelscope", "metrics", "optimizers", "quantization"} <= named
    assert named <= project["optional-dependencies"].keys()


def test_files_that_may_import_a_library_exist() -> None:
    for library, allowed in IMPORTERS.items():
        for path in allowed:
            assert (SOURCE / path).exists(), f"{library}: {path} does not exist"


HEAVY = ("torch", "transformers", "datasets", "peft", "accelerate", "matplotlib", "rich", "yaml", "numpy")


@pytest.mark.run
@pytest.mark.parametrize(
    "statement",
    [
        "import burnish",
        "from burnish.cli import main; main(['--help'])",
        "from burnish.cli import main; main(['version'])",
    ],
)
def test_importing_burnish_imports_no_library(statement: str) -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statement}\nprint('LOADED', *sys.modules)"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE.parent)},
    ).stdout  # fmt: skip
    modules = loaded.split("LOADED ")[1].split()
    assert "burnish" in modules
    assert not [name for name in modules if name in HEAVY]


@pytest.mark.run
def test_a_plan_registers_the_checks_of_every_module() -> None:
    """Checks are registered on import, so a check in a module that the plan does not import would never be called."""
    print_modules = "from burnish.run.plan.plan import CHECKS, NOTES\nfor one in CHECKS + NOTES: print(one.__module__)"
    registered = subprocess.run(
        [sys.executable, "-c", print_modules], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
    ).stdout.split()  # fmt: skip
    files = [file for file in FILES if re.search(r"^@(check|notes)$", text_of(file), re.MULTILINE)]
    declared = {".".join(file.relative_to(SOURCE.parent).with_suffix("").parts) for file in files}
    assert declared - set(registered) == set()


# --- options ----------------------------------------------------------------------------------------------------------

HOLDERS = {"options", "args", "choices", "_options", "training_args"}
"""Names of variables and attributes that hold the options."""


def _is_options(node: ast.expr) -> bool:
    """Tell whether an expression is the options: ``options``, ``self.options``, ``plan.options``, ``run.args``."""
    if isinstance(node, ast.Name):
        return node.id in HOLDERS
    return isinstance(node, ast.Attribute) and node.attr in HOLDERS


def _without_checks(tree: ast.Module) -> ast.Module:
    """Return the module without its check and note functions, which may compare any options."""
    statements = [
        n for n in tree.body if not (isinstance(n, ast.FunctionDef) and re.match(r"_?check_|\w+_notes$", n.name))
    ]
    return ast.Module(statements, type_ignores=[])


def option_reads(file: Path, with_checks: bool) -> Iterator[tuple[str, int]]:
    """Yield the options that a file reads: ``options.name``, ``getattr(options, "name")``, names listed for a
    getattr."""
    module = tree_of(file)
    tree = module if with_checks else _without_checks(module)
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and _is_options(node.value):
            yield node.attr, node.lineno
        # defined in optim.builtin
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "switch_arguments":
            yield ast.literal_eval(node.args[0]), node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and _is_options(node.args[0]):
            if isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value), node.lineno
            else:
                texts = (n for n in nodes_of(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
                yield from ((text.value, node.lineno) for text in texts)


def _readers(with_checks: bool) -> dict[str, set[str]]:
    """Return the packages that read each option."""
    from burnish.config.options import specs
    from burnish.run.plan.plan import RunOptions

    result: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        for name, _ in option_reads(file, with_checks):
            if name in specs(RunOptions):
                result[name].add(package_of(file) or "")
    return result


def test_every_option_is_read_or_has_a_reason() -> None:
    from burnish.config.options import specs
    from burnish.run.plan.plan import RunOptions

    readers = _readers(with_checks=True)
    unread = [name for name, spec in specs(RunOptions).items() if not spec.ignored and not readers[name]]
    assert not set(unread) - READ_ELSEWHERE, f"declared but never read: {unread}"
    readers_besides_checks = _readers(with_checks=False)
    unused = [
        name
        for name, spec in specs(RunOptions).items()
        if not spec.ignored and not readers_besides_checks[name] - {"trainer"}
    ]
    assert not set(unused) - READ_ELSEWHERE, f"declared but read only by checks or the trainer: {unused}"
    wrongly_ignored = [
        name
        for name, spec in specs(RunOptions).items()
        if spec.ignored and readers[name] - {"run", "explain", "export", "trainer"}
    ]
    assert not wrongly_ignored, f"declared as without effect but read: {wrongly_ignored}"


READ_ELSEWHERE = {
    "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_private_repo",
    "missing_control_tokens", "online",
}  # fmt: skip
"""Options that transformers' trackers read from ``args``, one that only a check reads, and one that selects a variant
of a stage (``StageObjective.variants``)."""
SHARED = {
    "lr_scheduler_type": {"optim"},  # loop computes the curves, optim creates torch's schedulers
    "lr_scheduler_kwargs": {"optim"},
    "learning_rate": {"adapters"},  # LoRA+ trains B with a multiple of it
    "overwrite_output_dir": {"models"},  # it also allows an export to overwrite a folder
    "cache_dir": {"data"},  # data sets use the same hub cache and tokens as models
    "hf_hub_token": {"data"},
    "ms_hub_token": {"data"},
    "per_device_train_batch_size": {"parallel"},  # a DeepSpeed config repeats these three
    "gradient_accumulation_steps": {"parallel"},
    "max_grad_norm": {"parallel"},
    "gradient_checkpointing": {"losses"},  # one variant drops the gradient of the router loss
    "gradient_checkpointing_kwargs": {"losses"},
    # Predictions in a run use the same sampling as the other commands.
    "do_sample": {"inference"},
    "temperature": {"inference"},
    "top_p": {"inference"},
    "top_k": {"inference"},
    "repetition_penalty": {"inference"},
    "max_new_tokens": {"inference"},
    "max_length": {"inference"},
    "metric_for_best_model": {"loop"},  # declared with the checkpoint options, used after an evaluation
    "greater_is_better": {"loop"},
    "load_best_model_at_end": {"loop"},
    "save_only_model": {"loop"},  # the loop holds the parts of a checkpoint
    "model_name_or_path": {"inference"},  # the model to load
    "template": {"inference"},
    "finetuning_type": {"inference"},  # the type of adapters to load
    "adapter_name_or_path": {"inference"},
    "max_completion_length": {"losses"},  # the denominator of Dr. GRPO
    "seed": {"models", "optim"},  # packages with random generators
}
"""Options that further components read, and why."""


def test_every_option_is_read_by_one_component() -> None:
    """Besides the package that declares an option, only commands and trainers may read it."""
    from burnish.config.options import specs
    from burnish.run.plan.plan import RunOptions

    for name, packages in _readers(with_checks=False).items():
        home = specs(RunOptions)[name].group.__module__.split(".")[1]
        others = (
            packages
            - {home, "rollouts", "run", "explain", "export", "trainer", "cli", "serve"}
            - SHARED.get(name, set())
        )
        assert not others, f"{name} is declared in {home} and read in {others}"


def test_no_nested_function_calls_itself() -> None:
    """A recursive closure is a reference cycle, which keeps variables, such as weights, until a collection."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for file in FILES:
        for outer in (node for node in nodes_of(tree_of(file)) if isinstance(node, functions)):
            for inner in (node for node in ast.walk(outer) if isinstance(node, functions) and node is not outer):
                reads = {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}
                assert inner.name not in reads, f"{name_of(file)}:{inner.lineno} {inner.name}"


def writes_to_options(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for target, line in assignments(tree):
        if _is_options(target.value):
            yield ast.unparse(target), line
    for node in nodes_of(tree):
        is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"setattr", "delattr"}
        if is_call and _is_options(node.args[0]):
            yield ast.unparse(node), node.lineno


def test_options_are_never_modified() -> None:
    files = [file for file in FILES if package_of(file) != "trainer"]
    assert not [(name_of(file), *place) for file in files for place in writes_to_options(tree_of(file))]


@pytest.mark.parametrize("line", ["options.seed = 1", "self.options.seed += 1", "setattr(options, 'seed', 1)"])
def test_modified_options_are_detected(line: str) -> None:
    assert list(writes_to_options(ast.parse(line)))


def test_every_option_group_belongs_to_the_run() -> None:
    """Options that are not part of the flat class could not be set. Servers have options that no run reads."""
    from burnish.run.plan.options import GROUPS, MEMBER_GROUPS
    from burnish.serve.api.options import ApiOptions
    from burnish.serve.eval.command import EvalOptions
    from burnish.serve.eval.dataset import PredictOptions
    from burnish.serve.eval.score import ScoreOptions
    from burnish.serve.page.options import WebOptions

    server_groups = (ApiOptions, EvalOptions, PredictOptions, ScoreOptions, WebOptions)
    joined = {base.__name__ for group in (*GROUPS, *MEMBER_GROUPS, *server_groups) for base in group.__mro__}
    for file in FILES:
        for node in nodes_of(tree_of(file)):
            is_group = isinstance(node, ast.ClassDef) and node.name.endswith("Options")
            if is_group and any(_is_option_call(statement) for statement in node.body):
                assert node.name in joined, f"{name_of(file)}: {node.name} is not part of RunOptions"


def _is_option_call(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") == "option"


# --- patches ----------------------------------------------------------------------------------------------------------

MODEL_NAMES = {
    "model", "module", "modules", "layer", "layers", "part", "embedding", "linear", "head", "inner", "backbone",
}  # fmt: skip
"""Names of variables that hold modules of a model. Attributes set on them are checked even if a class of burnish
declares an attribute of that name."""
OWN_OBJECTS = {"self", "ctx", "cls", "run", "args", "own", "view", "keeper", "callback", "TrainerCallbackHandler",
               "control", "summary", "callback_handler"}  # fmt: skip
"""Names of variables that hold objects of burnish's classes."""
SETTINGS = {
    "config", "described", "server", "get_text_config", "finalize", "text", "generation_config", "generation",
    "limited", "tokenizer",
    "processing_class", "peft_config",
    "args", "cudnn", "backend", "holder", "loader", "found",
}  # fmt: skip
"""Names of library objects that are meant to be modified: configs, tokenizers and switches."""
TENSOR_ATTRIBUTES = {"data", "grad", "requires_grad"}
CODE_ATTRIBUTES = {"forward", "__class__", "__call__"}
"""Attributes that hold code: setting them on any object but ``self`` replaces its code."""
EXCEPTIONS = {
    "parallel/deepspeed/parallel.py": "the number of micro-batches of a skipped step",
    "adapters/lora_model.py": "a copy of peft's config, made there",
    "kernels/lora.py": "a module made there, to be asked",
    "models/patches/fused.py": "stand_in is made there, to be asked",
    "kernels/probe.py": "the mode of each module is given back",
    "models/load.py": "a model that was just made is given its generation config",
    "trainer/data/outputs.py": "a hook for one forward pass, removed after it",
    "trainer/trl/rollouts/attributes.py": "options that a script changes",
    "trainer/seq2seq.py": "a generation config that the arguments name",
    "parallel/single.py": "a fused optimizer of torch reads these two names from itself",
    "models/generate.py": "a subclass of transformers' cache, made there",
    "optim/bnb.py": "a function made there gets its docstring",
    "run/loop.py": "a schedule continues with another learning rate",
    "rollouts/rewards/functions.py": "the module of a reward file, under a name that only it has",
    "utils/activity.py": "an exception carries the activity that it interrupted",
    "run/partial_results.py": "an exception carries the file of the results of the pass that it interrupted",
}
"""Files that set attributes of other objects, and why that is not a patch."""


@cache
def own_attributes() -> set[str]:
    """Return the attributes that burnish's classes declare: fields, and what their methods set on ``self``."""
    result = set()
    for node in (node for file in FILES for node in nodes_of(tree_of(file))):
        if isinstance(node, ast.ClassDef):
            fields = (s.target for s in node.body if isinstance(s, ast.AnnAssign))
            result |= {field.id for field in fields if isinstance(field, ast.Name)}
            result |= {target.attr for target, _ in assignments(node) if getattr(target.value, "id", "") == "self"}
    return result


def _root(node: ast.expr) -> str:
    """Return the object on which an attribute is set: ``config`` in ``model.config.use_cache = ...``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return _root(node.func)
    return _root(node.value) if isinstance(node, ast.Subscript) else getattr(node, "id", "")


def assignments(tree: ast.AST) -> Iterator[tuple[ast.Attribute, int]]:
    for node in nodes_of(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [getattr(node, "target", None)]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute):
                    yield each, each.lineno


def unregistered_patches(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield changes to objects of other libraries that do not use ``utils.patching``."""
    aliases = {
        target.id
        for node in nodes_of(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_namespace(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for target, line in assignments(tree):
        root = _root(target.value)
        is_declared = target.attr in own_attributes() and root not in MODEL_NAMES
        is_known = is_declared or target.attr in TENSOR_ATTRIBUTES or root in OWN_OBJECTS | SETTINGS
        if not is_known or (target.attr in CODE_ATTRIBUTES and root != "self"):
            yield ast.unparse(target), line
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            is_set = name in {"setattr", "delattr"} or ast.unparse(node.func) in {
                "object.__setattr__",
                "object.__delattr__",
            }
            is_foreign = is_set and _root(node.args[0]) not in OWN_OBJECTS | SETTINGS
            is_hook = name.startswith("register_") and name.endswith("hook")
            is_update = name == "update" and _is_namespace(getattr(node.func, "value", node))
            if is_foreign or is_hook or is_update:
                yield ast.unparse(node), node.lineno
        is_written = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        if is_written and (_is_namespace(node.value) or getattr(node.value, "id", "") in aliases):
            yield ast.unparse(node), node.lineno


def _is_namespace(node: ast.expr) -> bool:
    """Tell whether an expression is the namespace of another object: ``vars(x)``, ``x.__dict__``, ``sys.modules``."""
    if isinstance(node, ast.Call):
        return (
            getattr(node.func, "id", "") in {"vars", "globals"}
            and bool(node.args)
            and _root(node.args[0]) not in OWN_OBJECTS
        )
    return (
        isinstance(node, ast.Attribute)
        and node.attr in {"__dict__", "modules"}
        and _root(node.value) not in OWN_OBJECTS
    )


def test_foreign_code_is_only_changed_through_the_patch_register() -> None:
    others = [file for file in FILES if name_of(file) not in EXCEPTIONS.keys() | {"utils/patching.py"}]
    result = {name_of(file): list(unregistered_patches(tree_of(file))) for file in others}
    result = {name: places for name, places in result.items() if places}
    assert not result, f"{result}; use utils.patching.patch(owner, name, value, why)"


def test_exceptions_to_the_patch_register_still_exist() -> None:
    for name in EXCEPTIONS:
        tree = tree_of(SOURCE / name)
        assert list(unregistered_patches(tree)), f"{name} no longer sets attributes; remove it from EXCEPTIONS"


@pytest.mark.parametrize(
    "line",
    [
        "module.forward = faster", "setattr(module, 'forward', faster)", "vars(module)['forward'] = faster",
        "names = vars(file)\nnames['rotate'] = faster", "module.__dict__['forward'] = faster", "del module.forward",
        "layer.mlp.forward, x = faster, 1", "module.register_forward_hook(listen)", "sys.modules['peft'] = mine",
        "vars(module).update(forward=faster)", "module.__class__ = Faster", "transformers.rotate = faster",
        "found.forward = faster", "object.__setattr__(module, 'forward', faster)",
        "self.model.layers[0].forward = faster",
    ],
)  # fmt: skip
def test_change_without_the_patch_register_is_detected(line: str) -> None:
    assert list(unregistered_patches(ast.parse(line)))


def test_components_do_not_accept_untyped_options() -> None:
    untyped = re.compile(r"\b_?options: (Any|object)\b")
    generic = {"config/options.py", "config/registry.py"}  # they read options by their declared names only
    result = [name_of(f) for f in FILES if name_of(f) not in generic and untyped.search(text_of(f))]
    assert not result


def test_each_package_has_an_introductory_docstring() -> None:
    docstrings = {name_of(file): ast.get_docstring(tree_of(file)) or "" for file in FILES}
    packages = [name for name in docstrings if name.endswith("/__init__.py")]
    assert not [name for name in packages if not docstrings[name]]
    top_level = [name for name in packages if name.count("/") == 1]
    assert not [name for name in top_level if not re.search(r"Begin\s+with", docstrings[name])]


def _imports(file: Path, names: dict[str, Path]) -> set[str]:
    """Return the modules of burnish that a file imports, also inside of functions and for type annotations."""
    result: set[str] = set()
    for node in nodes_of(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            result |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return result & names.keys()


def test_no_circular_imports() -> None:
    names = {".".join(f.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
    left = {name: _imports(file, names) - {name} for name, file in names.items()}
    while ready := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, {name: sorted(imported & left.keys()) for name, imported in left.items()}


SAME_CLASS_NAME = {"DefaultFlowCallback"}  # burnish's class, and a subclass of transformers' class for scripts


def test_class_names_are_unique() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(name_of(file))
    result = {name: places for name, places in files.items() if len(places) > 1}
    assert result.keys() == SAME_CLASS_NAME, result


def test_folders_have_at_most_15_files() -> None:
    sizes = {name_of(folder): len(list(folder.glob("*.py"))) for folder in SOURCE.rglob("*") if folder.is_dir()}
    assert {name: size for name, size in sizes.items() if size > 15} == {}


_CALLED_BY_NAME = {
    "_get_learning_rate", "_setup_devices",
    "compute_rewards", "load_rewards", "missing_columns", "stage_defaults", "RolloutLoss",
}  # fmt: skip
"""Attributes of a Trainer and its arguments that transformers, callbacks and scripts use; and parts of rollouts that
are not used yet."""


def test_every_definition_is_used() -> None:
    """The name of a function, class or private method without a decorator occurs at least twice in the source code."""
    words: dict[str, int] = defaultdict(int)
    for file in FILES:
        for word in re.findall(r"\w+", text_of(file)):
            words[word] += 1
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    unused = []
    for file in FILES:
        tree = tree_of(file)
        methods = [definition for node in nodes_of(tree) if isinstance(node, ast.ClassDef) for definition in node.body]
        private = [
            definition for definition in methods if isinstance(definition, kinds) and definition.name.startswith("_")
        ]
        free = [definition for definition in tree.body if isinstance(definition, (*kinds, ast.ClassDef))]
        unused += [
            definition.name
            for definition in (*free, *private)
            if words[definition.name] == 1 and not definition.decorator_list
        ]
    found_by_name = {name for name in unused if name.startswith(("__", "check_")) or name.endswith("_notes")}
    assert sorted(set(unused) - _CALLED_BY_NAME - found_by_name) == []


@pytest.mark.parametrize("package", ["parallel", "inference", "serve"])
def test_files_of_servers_have_a_maximum_length(package: str) -> None:
    lengths = {name_of(f): len(text_of(f).splitlines()) for f in (SOURCE / package).rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


_STAGE_FILES = {
    "kto": {"losses/kto.py", "trainer/trl/preferences/config.py", "trainer/trl/preferences/trainer.py"},
    "dpo": {"losses/pairs.py", "trainer/trl/preferences/trainer.py", "demo/command.py", "serve/page/layout.py"},
    "rm": {"losses/reward.py", "serve/eval/dataset.py"},
}
"""Files that may name a stage: its objective, its trainer, a preset of the web UI, and commands for one stage."""


@pytest.mark.parametrize("stage", _STAGE_FILES)
def test_stage_names_occur_only_in_their_files(stage: str) -> None:
    """Other files read what an objective declares."""
    result = {name_of(file) for file in FILES if f'"{stage}"' in text_of(file)}
    assert result <= _STAGE_FILES[stage]


def documented_arguments(docstring: str) -> list[str]:
    """Return the names in the section ``Args:`` of a docstring."""
    section = re.search(r"Args:\n((?:    .*\n|\n)*)", docstring + "\n")
    result = re.findall(r"^    (\*{0,2}\w+(?:, \w+)*):", section.group(1), re.MULTILINE) if section else []
    return [name.strip(" *") for names in result for name in names.split(",")]


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    signature = node.args
    parameters = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg, signature.kwarg]
    return {parameter.arg for parameter in parameters if parameter is not None}


def accepted_names(node: ast.AST) -> set[str] | None:
    """Return parameters of a function, or fields and constructor parameters of a class; None if it inherits them."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return parameters_of(node)
    assert isinstance(node, ast.ClassDef)
    constructors = [
        member for member in node.body if isinstance(member, ast.FunctionDef) and member.name in {"__init__", "__new__"}
    ]
    fields = {
        member.target.id
        for member in node.body
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
    }
    if not constructors and (node.bases or not fields):
        return None
    return fields.union(*map(parameters_of, constructors))


def test_documented_arguments_exist() -> None:
    missing = []
    for file in FILES:
        for node in nodes_of(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names, accepted = documented_arguments(ast.get_docstring(node) or ""), accepted_names(node)
                missing += [f"{file.name}:{node.lineno} {name}" for name in names if accepted and name not in accepted]
    assert missing == []
