"""A misspelt option is found by the type checker, wherever it stands."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANTED = {
    "core/loop.py": ("options.max_grad_norm", "options.max_grad_nrom"),
    "core/best.py": ("options.save_strategy", "options.save_strategie"),
    "app/build.py": ("options.dataloader_drop_last", "options.dataloader_drop_lost"),
    "app/assemble.py": ("options.save_only_model", "options.save_model_only"),
    "app/checks.py": ("options.eval_dataset", "options.evaldataset"),
    "adapters/lora.py": ("options.loraplus_lr_ratio", "options.loraplus_ratio"),
    "data/batches/batching.py": ("options.neat_packing", "options.nice_packing"),
    "models/tokens.py": ("options.trust_remote_code", "options.trust_remote"),
    "optim/builtin.py": ("options.adam_beta1", "options.adam_beta"),
    "engine/options.py": ("options.bf16_full_eval", "options.bf16_ful_eval"),
    "infer/loading.py": ("options.served_adapters", "options.serve_adapters"),
    "models/fingerprint.py": ("options.train_from_scratch", "options.train_from_scrach"),
    "objectives/pairs.py": ("options.pref_ftx", "options.pref_fxt"),
    "optim/badam.py": ("options.badam_mode", "options.badam_modus"),
    "report/profile.py": ("options.profile_steps", "options.profiled_steps"),
    "hf/trainer.py": ("args.full_determinism", "args.ful_determinism"),
    "hf/training.py": ("args.ignore_data_skip", "args.ignore_data_skips"),
    "hf/seq2seq.py": ("args.generation_num_beams", "args.generation_num_beam"),
    "hf/sft/trainer.py": ("args.packing_strategy", "args.packing_strategie"),
    "hf/arguments/checks.py": ("args.warmup_steps", "args.warmup_step"),
}
"""File -> what it reads, and the misspelling that stands there in the copy."""


def test_the_flat_class_that_a_type_checker_sees_has_the_groups_of_the_one_that_runs():
    from burnish.app import options
    from burnish.hf.arguments import fields
    from burnish.infer import options as answers

    def bases(file: str, name: str) -> set[str]:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        (seen,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
        return {base.id for base in seen.bases}

    assert bases(fields.__file__, "Groups") == {group.__name__ for group in fields.Groups.__bases__}
    answering = bases(answers.__file__, "AnsweringOptions")
    seen = bases(options.__file__, "RunOptions") - {"AnsweringOptions"} | answering
    joined = {group.__name__ for group in (*options.GROUPS, *options.MEMBER_GROUPS)}
    assert seen == {name for name in joined if not name.startswith("Dummy")}


@pytest.mark.slow
def test_a_misspelt_option_fails_the_type_check(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, (right, wrong) in PLANTED.items():
        file = tmp_path / "src" / "burnish" / name
        text = file.read_text(encoding="utf-8")
        assert right in text, name
        file.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = set(re.findall(r"src/burnish/(\S+?):\d+: error: .* has no attribute", checked.stdout))
    assert found == set(PLANTED), checked.stdout
