"""Promises of docs/security.md that no other test covers. Each test that the page names exists."""

import json
import re
from pathlib import Path

import pytest

from bad_inputs import read_output
from burnish import cli

PAGE = Path(__file__).parents[1] / "docs" / "security.md"


def test_every_security_promise_names_an_existing_test() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for row in rows:
        file, name = re.findall(r"`(test_\w+\.py): (test_\w+)`", row)[-1]
        assert f"def {name}(" in next(Path(__file__).parent.rglob(file)).read_text(encoding="utf-8"), row


@pytest.mark.run
def test_trust_remote_code_is_recorded_in_log_and_card(user_folder: Path) -> None:
    classes = {"auto_map": {"AutoImageProcessor": "code.Processor"}}
    Path("model/preprocessor_config.json").write_text(json.dumps(classes), encoding="utf-8")
    assert cli.main(["train", "run.yaml", "max_steps=1", "trust_remote_code=true"]) == 0
    message = "trust_remote_code: Python code that comes with model may run with your permissions."
    assert message in Path("out/run.log").read_text(encoding="utf-8")
    assert "trust_remote_code: true" in Path("out/README.md").read_text(encoding="utf-8")
    assert cli.main(["train", "run.yaml", "max_steps=1", "output_dir=other"]) == 0
    assert "trust_remote_code" not in Path("other/run.log").read_text(encoding="utf-8")


def test_trust_remote_code_is_not_reported_for_a_model_without_code(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "run.yaml", "trust_remote_code=true"]) == 0
    assert "may run with your permissions" not in "".join(read_output(capsys))
    config = json.loads(Path("model/config.json").read_text(encoding="utf-8"))
    own = {"auto_map": {"AutoTokenizer": ["tokens.Own", None]}}
    Path("model/config.json").write_text(json.dumps({**config, **own}), encoding="utf-8")
    cli.main(["explain", "run.yaml", "trust_remote_code=true"])
    assert "may run with your permissions" in "".join(read_output(capsys))


@pytest.mark.parametrize(
    "escape",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.__class__.__base__.__subclasses__() }}", "{% include '/etc/passwd' %}",
     "{{ self.__init__.__globals__ }}", "{{ messages.append(1) }}", "{% import 'os' as os %}"],
)  # fmt: skip
def test_chat_template_cannot_leave_its_sandbox(
    escape: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    Path("escape.jinja").write_text(text + escape, encoding="utf-8")
    assert cli.main(["explain", "run.yaml", "template=escape.jinja"]) == 2
    assert "root:" not in "".join(read_output(capsys))


def test_yaml_creates_no_python_objects(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    created = Path("made")
    line = f"columns: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{created}]]\n"
    run = Path("run.yaml").read_text(encoding="utf-8")
    Path("run.yaml").write_text(run + line, encoding="utf-8")
    assert cli.main(["explain", "run.yaml"]) == 2
    Path("run.yaml").write_text(run, encoding="utf-8")
    Path("mine.yaml").write_text("user: " + line.partition(": ")[2], encoding="utf-8")
    assert cli.main(["explain", "run.yaml", "template=mine.yaml"]) == 2
    read_output(capsys)
    assert not created.exists()


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/tmp/elsewhere.safetensors"])
def test_weight_index_cannot_reference_files_outside_its_folder(
    name: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model/model.safetensors").rename("elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert cli.main(["explain", "run.yaml"]) == 2
    assert "it names a file outside of its folder" in read_output(capsys)[1]
