"""Well-known examples run with only the import line and the model path changed."""

import sys

import pytest

from example_scripts import EXAMPLES, ROOT, run_script

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    sys.path.insert(0, str(EXAMPLES))
    from tiny_bert import make

    return make(tmp_path_factory.mktemp("model"))


def test_sentiment_example_trains_saves_loads_and_predicts(tiny_bert, tmp_path):
    pytest.importorskip("sklearn")
    process = run_script("bert_sentiment.py", "--model", tiny_bert, "--output", "out", folder=tmp_path)
    assert "Accuracy:" in process.stdout
    assert process.stdout.count("-- Predicted Label:") == 2
    assert "`evaluation_strategy` is deprecated. Use `eval_strategy`" in process.stderr
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_sentence_pair_example_stops_early_and_keeps_the_best(tiny_bert, tmp_path):
    process = run_script("mrpc_early_stopping.py", "--model", tiny_bert, "--output", "out", folder=tmp_path)
    accuracy = float(process.stdout.split("Accuracy:")[1].split()[0])
    assert accuracy > 0.8
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


@pytest.mark.slow
def test_interrupted_iterator_resumes_at_next_item(tmp_path):
    assert "nothing twice, nothing left out" in run_script("interrupted_iterator.py", folder=tmp_path).stdout


@pytest.mark.slow
def test_code_of_migration_guide_runs(tmp_path):
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    (tmp_path / "guide.py").write_text("\n".join(blocks), encoding="utf-8")
    process = run_script(tmp_path / "guide.py", folder=tmp_path)
    assert float(process.stdout.split()[-1]) < 1
