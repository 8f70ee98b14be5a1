"""The rows of a step, which are named after a failed step."""

from burnish.data.batches.loader import StepPartition
from burnish.trainer.data.torch_loader import EpochOrder, RowIndicesOfStep


def test_order_of_an_epoch_is_computed_once_to_name_the_rows_of_a_step(monkeypatch):
    order, epochs = EpochOrder(100, StepPartition(4, 2), seed=0), []
    whole = order.of_epoch(3)
    monkeypatch.setattr(order, "of_epoch", lambda epoch: epochs.append(epoch) or whole)
    rows = RowIndicesOfStep(order, epoch=3, first=2, end=4)
    assert not epochs
    assert list(rows) == whole[8:16]
    assert len(rows) == 8
    assert epochs == [3]
