"""`StatefulDataLoader` of torchdata as a loader under test.

What its documentation leaves to the training loop is done here: epochs are counted and told to the
sampler, and the count is saved beside the state of the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from datapipe.conformance import Loader, Records, Setting


class _Torch:
    """The batches of all epochs; a new loader for each epoch and after each restore."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._epoch = 0
        self._loader = self._start(None)
        self._batches = iter(self._loader)

    def _start(self, state: Any) -> Any:
        setting = self._setting
        sampler = StatefulDistributedSampler(
            setting.source,
            num_replicas=setting.hosts,
            rank=setting.host,
            shuffle=setting.shuffle,
            seed=setting.seed,
            drop_last=setting.remainder == "drop",
        )
        sampler.set_epoch(self._epoch)
        loader = StatefulDataLoader(
            setting.source,
            batch_size=setting.batch_size // setting.hosts,
            sampler=sampler,
            num_workers=setting.workers,
            drop_last=setting.remainder == "drop",
            collate_fn=list if setting.raw else _numbers,
        )
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def __iter__(self) -> _Torch:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                return next(self._batches)
            except StopIteration:
                if self._epoch + 1 >= self._setting.epochs:
                    raise
            self._epoch += 1
            self._loader = self._start(None)
            self._batches = iter(self._loader)

    def get_state(self) -> dict[str, Any]:
        """The epoch, and where the loader is in it."""
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes there."""
        self._epoch = state["epoch"]
        self._loader = self._start(state["loader"])
        self._batches = iter(self._loader)


def _numbers(records: Sequence[bytes]) -> list[int]:
    return [Records.number(each) for each in records]


TORCHDATA: Final = Loader(
    name="torchdata",
    open=_Torch,
    offers=frozenset({"keep", "drop", "workers", "hosts"}),
    packages=("torchdata", "torch"),
)
"""`StatefulDataLoader` over a map-style dataset, with `StatefulDistributedSampler`."""
