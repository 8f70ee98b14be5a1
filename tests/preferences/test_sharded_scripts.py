"""Preference scripts with sharded weights: the losses of one process."""

import json
import math

import pytest
from script_runs import losses, make

from small_run import make_model
from two_processes import in_two_processes

pytestmark = pytest.mark.run


def script(folder, output, **options):
    trainer = make("DPOTrainer", f"{folder}/model", output, **options)
    result = losses(trainer)
    if trainer.is_world_process_zero():
        with open(f"{output}.json", "w") as file:
            json.dump(result, file)


def sharded(folder, output):
    script(folder, output, per_device_train_batch_size=1, fsdp="full_shard", ddp_backend="gloo")


@pytest.mark.slow
def test_reference_of_sharded_policy_is_the_initial_model(tmp_path):
    make_model(tmp_path / "model")
    script(tmp_path, tmp_path / "one")
    in_two_processes(sharded, str(tmp_path), str(tmp_path / "two"))
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert abs(one[-1] - math.log(2)) > 0.01  # with a reference that equals the policy, the loss would stay there
    assert two == pytest.approx(one, rel=1e-4)
