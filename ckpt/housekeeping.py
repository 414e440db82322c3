"""What the writer asks of its keeper, and how it comes by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from ckpt.deliveries import Depot
from ckpt.keeping import Keeper, LocalPlace, Place, SharedPlace
from ckpt.lineage import Lineage, StepId
from ckpt.messages import Setup, Tell
from ckpt.store import Store
from ckpt.tiers import Local


class Keeping(Protocol):
    """Log and retention; see `ckpt.keeping`. Only `lost` and `close` may take long."""

    def begin(self, owner: int, line: Lineage) -> None: ...
    def supersede(self, owner: int) -> None: ...
    def saved(self, tier: str, step: StepId, figures: Mapping[str, Any]) -> None: ...
    def freed(self, tier: str) -> None: ...
    def lost(self, tier: str, step: StepId) -> int: ...
    def note(self, event: Mapping[str, Any]) -> None: ...
    def settle(self, then: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


MakeKeeper = Callable[
    [Setup, Depot, Mapping[str, Store], Callable[[], Collection[StepId]], Tell], Keeping
]
"""From the setup, images and stores by tier, the steps still to be promoted, and whom to tell."""


def make_keeper(
    setup: Setup,
    depot: Depot,
    stores: Mapping[str, Store],
    queued: Callable[[], Collection[StepId]],
    tell: Tell,
) -> Keeping:
    """The keeper of a run: of Local images in each process, of steps in process 0."""
    places: dict[str, Place] = {}
    for name, tier in setup.tiers.items():
        if isinstance(tier, Local):
            places[name] = LocalPlace(depot.images[name], tier.keep, queued)
        elif setup.index == 0:
            home = None if stores[name] is depot.home else depot.home
            places[name] = SharedPlace(stores[name], tier.keep, home)
    return Keeper(depot.home, places, tell, index=setup.index)
