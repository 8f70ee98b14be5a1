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
