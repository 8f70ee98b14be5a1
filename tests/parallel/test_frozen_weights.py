"""Frozen weights under DDP are sent between processes only where they differ."""

import json
from pathlib import Path

import pytest
from torch import distributed, nn

from two_processes import in_two_processes

pytestmark = pytest.mark.run


def write_wrapped_weights(path):
    """Write the weights of each rank after DDP has wrapped the model, and whether DDP ignores the frozen ones."""
    from burnish.parallel.ddp import DdpParallel
    from burnish.run.plan.plan import RunOptions

    engine, result = DdpParallel(RunOptions(use_cpu=True, ddp_backend="gloo")), {}
    for name, first in (("same", 1.0), ("apart", 1.0 + engine.rank)):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[0].weight.requires_grad_(False).fill_(first)
        model[1].weight.data.fill_(float(engine.rank))
        wrapped = engine.wrap(model)
        weights = [weight.detach()[0, 0].item() for weight in wrapped.parameters()]
        result[name] = [bool(wrapped.parameters_to_ignore), *weights]
    Path(f"{path}.{engine.rank}").write_text(json.dumps(result))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_only_differing_frozen_weights_are_broadcast_from_rank_0(tmp_path):
    in_two_processes(write_wrapped_weights, str(tmp_path / "rank"))
    for rank in (0, 1):
        result = json.loads((tmp_path / f"rank.{rank}").read_text())
        assert result["same"] == [True, 1.0, 0.0]
        assert result["apart"] == [False, 1.0, 0.0]
