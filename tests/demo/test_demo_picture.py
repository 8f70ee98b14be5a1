"""The image demo: the model and images are reproducible, and training on them improves the accuracy."""

import re
import shlex

import pytest

from burnish.demo.images import demo_picture, draw_set, make_model
from burnish.serve.chat.command import chat


def test_model_and_images_are_reproducible_from_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.demo.images._TRAINED", 6)
    monkeypatch.setattr("burnish.demo.images._HELD_OUT", 3)
    questions = [draw_set(tmp_path / name) for name in ("one", "two")]
    assert questions[0] == questions[1]
    assert len(questions[0]) == 3
    for number in range(9):
        first, second = (tmp_path / name / f"{number:04}.png" for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
    for name in ("a", "b"):
        make_model(tmp_path / name)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.run
def test_model_card_of_a_vision_model_loads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("burnish.demo.images._TRAINED", 6)
    monkeypatch.setattr("burnish.demo.images._HELD_OUT", 3)
    options = ["max_steps=1", "warmup_steps=0", "use_cpu=true", "save_strategy=no", "eval_strategy=no"]
    assert demo_picture(options) == 0
    assert "The share of correct responses did not increase." in capsys.readouterr().out
    header, code = (tmp_path / "demo-image-run/README.md").read_text().split("## How to use it")
    assert "pipeline_tag: image-text-to-text" in header
    assert "burnish chat demo-image-run" in code
    monkeypatch.chdir("demo-image-run")
    exec(code.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_image_demo_improves_accuracy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert demo_picture(["num_train_epochs=1"]) == 0
    printed = capsys.readouterr().out
    result = re.search(r"held-out images: (\S+) before, (\S+) after", printed)
    assert result is not None
    assert float(result[1]) == 0.0
    assert float(result[2]) > 0.15
    suggested = re.search(r"burnish chat (.* --image .*)", printed)
    assert suggested is not None
    assert chat(shlex.split(suggested[1])) == 0
    assert 0 < len(capsys.readouterr().out.split()) < 10
