"""An order that is interrupted and goes on: nothing twice, nothing left out.

    python examples/interrupted_iterator.py

Walk-throughs of resuming save the state of a generator and the item that was read last, and begin again with that item:
it comes twice. Here the order is a function of (seed, epoch), so that a place in it is two numbers, and the place that
is kept is that of the item which comes next.
"""

import json
from itertools import chain, islice

import torch

from burnish.data.batches.loader import order_of


class Shuffled:
    """The items of epoch after epoch, from a place that can be kept."""

    def __init__(self, num_items: int, seed: int, epoch: int = 0, position: int = 0) -> None:
        self.num_items, self.seed = num_items, seed
        self.epoch, self.position = epoch, position

    def __iter__(self):
        while True:
            order = order_of(self.num_items, self.seed, self.epoch)
            for item in order[self.position :]:
                self.position += 1  # before the item is handed over: the place is behind it
                yield item
            self.epoch, self.position = self.epoch + 1, 0

    def place(self) -> tuple[int, int]:
        return self.epoch, self.position


whole = list(islice(Shuffled(6, seed=42), 15))

first = Shuffled(6, seed=42)
before = list(islice(first, 8))  # into the second epoch, then the power goes
place = json.loads(json.dumps(first.place()))  # two numbers are all there is to keep
after = list(islice(Shuffled(6, 42, *place), 7))

print("uninterrupted:", whole)
print("interrupted:  ", before, "|", after)
assert list(chain(before, after)) == whole

# The same for a generator: its state before the draw is the place of what comes next.
generator = torch.Generator().manual_seed(42)
torch.rand(3, generator=generator)
state = generator.get_state()
expected = torch.rand(3, generator=generator)
again = torch.Generator()
again.set_state(state)
assert torch.equal(torch.rand(3, generator=again), expected)
print("nothing twice, nothing left out")
