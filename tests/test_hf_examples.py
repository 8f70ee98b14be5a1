"""The demos that people know run as they are written, but for the import line and a local model folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
}  # fmt: skip


def run(example, *arguments, folder):
    command = [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_bert import make

    return make(tmp_path_factory.mktemp("model"))


def test_the_sentiment_demo_trains_saves_loads_and_predicts(tiny_bert, tmp_path):
    pytest.importorskip("sklearn")
    done = run("bert_sentiment.py", "--model", tiny_bert, "--output", "out", folder=tmp_path)
    assert "Accuracy:" in done.stdout
    assert done.stdout.count("-- Predicted Label:") == 2
    assert "`evaluation_strategy` is now `eval_strategy`" in done.stderr
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


def test_the_sentence_pair_demo_stops_early_and_keeps_the_best(tiny_bert, tmp_path):
    done = run("mrpc_early_stopping.py", "--model", tiny_bert, "--output", "out", folder=tmp_path)
    accuracy = float(done.stdout.split("Accuracy:")[1].split()[0])
    assert accuracy > 0.8
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


def test_an_interrupted_iterator_goes_on_with_the_next_item(tmp_path):
    assert "nothing twice, nothing left out" in run("interrupted_iterator.py", folder=tmp_path).stdout


def test_the_code_of_the_migration_guide_runs(tmp_path):
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    (tmp_path / "guide.py").write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run([sys.executable, "guide.py"], cwd=tmp_path, text=True, capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) < 1
