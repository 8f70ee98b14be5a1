"""Files of completions: parquet in the format of TRL's trainers, and ``completions.jsonl``."""

import json
from types import SimpleNamespace

from pyarrow import parquet

from burnish.loop.state import TrainerControl, TrainerState
from burnish.rollouts.journal import CompletionsCallback
from burnish.rollouts.samples import ScoredCompletion
from burnish.trainer.trl.rollouts.tables import CompletionTablesCallback


def test_each_log_has_a_table_of_the_newest_generation(tmp_path, capsys):
    options = SimpleNamespace(num_completions_to_print=1, log_unique_prompts=False)
    recorded = CompletionTablesCallback(options, tmp_path)
    state = TrainerState(global_step=10, max_steps=10)
    samples = [ScoredCompletion(0, at, "record 1", [1], [2, 3], [1, 1], True, "2 + 2?", str(at), [float(at == 4), None],
                      {"parsed": at}, at - 3.5) for at in (3, 4)]  # fmt: skip
    recorded.add(samples, ["exact", "other"], 10, 0)
    recorded.on_log(None, state, TrainerControl(), {"eval_loss": 0.0})
    assert not (tmp_path / "completions").exists()
    recorded.on_log(None, state, TrainerControl(), {"loss": 0.0})
    recorded.on_log(None, state, TrainerControl(), {"loss": 0.0})  # no new generation
    (file,) = (tmp_path / "completions").iterdir()
    assert file.name == "completions_00010.parquet"
    assert parquet.read_table(file).to_pylist() == [
        {"step": 10, "prompt": "2 + 2?", "completion": str(at), "exact": float(at == 4), "other": None, "parsed": at,
         "advantage": at - 3.5} for at in (3, 4)
    ]  # fmt: skip
    assert "Completions for step 10" in capsys.readouterr().out


def test_resumed_run_keeps_the_complete_lines_up_to_its_step(tmp_path):
    lines = [json.dumps({"step": step, "completion": text}, ensure_ascii=False)
             for step, text in ((1, "a\u2028b\x85c"), (2, "d"), (3, "e"))]  # fmt: skip
    path = tmp_path / "completions.jsonl"
    path.write_bytes("\n".join([*lines, '{"step": 2, "completion": "é']).encode()[:-1])  # killed within a character
    CompletionsCallback(None, tmp_path).on_train_begin(None, TrainerState(global_step=2), TrainerControl())
    assert path.read_text(encoding="utf-8") == f"{lines[0]}\n{lines[1]}\n"
