"""accelerate's own functions, loggers and states in scripts, with one process and with several on CPUs."""

import json
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState

from burnish import TrainingArguments
from trainer_run import make_trainer
from two_processes import in_two_processes


def test_loggers_of_accelerate_work_after_the_arguments(tmp_path, caplog):
    PartialState._reset_state()
    TrainingArguments(str(tmp_path), use_cpu=True)
    get_logger("script", log_level="INFO").info("started")
    assert caplog.messages[-1].endswith("started")
    assert PartialState().device.type == "cpu"


def test_the_accelerator_state_is_initialized_by_a_trainer(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    make_trainer(tmp_path, max_steps=1)
    assert AcceleratorState().deepspeed_plugin is None
    assert AcceleratorState().num_processes == 1
    assert Accelerator().num_processes == 1


def run_script(folder: str) -> None:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import gather_object

    accelerator, state = Accelerator(), PartialState()
    trainer = make_trainer(Path(folder) / "out", max_steps=2)
    trainer.train()
    trainer = make_trainer(Path(folder) / "other", max_steps=1)
    rank = trainer.args.process_index
    found = {
        "gathered": gather_object([rank]), "of_state": [state.num_processes, state.process_index],
        "of_accelerator": [accelerator.num_processes, accelerator.process_index], "is_main": state.is_main_process,
    }  # fmt: skip
    accelerator.wait_for_everyone()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.run
def test_states_of_accelerate_have_all_processes(tmp_path):
    in_two_processes(run_script, str(tmp_path))
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "gathered": [0, 1], "of_state": [2, rank], "of_accelerator": [2, rank], "is_main": rank == 0,
        }  # fmt: skip
