"""How a restore uses memory and threads, and who is told how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import Misuse

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Loading:
    """How a restore reads. What comes of it is the same for all of them."""

    budget_bytes: int = 1 << 30
    """Bytes of scratch memory in use at a time, and of host memory on its way to devices that do
    not share it. A chunk or leaf above it goes alone."""
    threads: int = 2
    """That read and verify; TensorStore has its own for steps of Orbax."""
    donate: bool = False
    """Let go of `like` first, so that the peak is one state and not two.

    The jax arrays in `like`, and with them those that share their memory, are deleted once every
    leaf is known to match what was saved, and each of `data` to have a saved position, and before
    any value is read. NumPy arrays stay, and so do leaves that keep their value because of `fit`,
    with all that shares memory with them. Nothing is deleted where nothing is there to restore, nor
    for a step that raises `Mismatch`. After another error `like` is gone, and it is gone when a
    damaged step has made way for an older one; as a template it still serves. Among several
    processes each looks at its own leaves and `data` only."""
    progress: Callable[[int, int], None] | None = None
    """Told the bytes done, and the bytes in all, in the thread that restores; for steps of Orbax
    once for each item. Begins anew when an older step has to be taken. What it raises ends the
    restore."""

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise Misuse(f"{name}: wanted a whole number from 1 on, found {value!r:.200}")
        if not isinstance(self.donate, bool):
            raise Misuse(f"donate: wanted True or False, found {self.donate!r:.200}")
        if self.progress is not None and not callable(self.progress):
            raise Misuse(
                "progress: wanted a function of the bytes done and the bytes in all, found "
                f"{self.progress!r:.200}"
            )


DEFAULT = Loading()


def let_go(going: Iterable[Any], staying: Iterable[Any] = ()) -> None:
    """Delete the jax arrays among `going`, except those that share memory with one that stays.

    Several arrays may have one buffer, as after `device_put` to where an array lies already: with
    one of them all are gone.
    """
    leaving, kept = _arrays(going), _arrays(staying)
    looks = set(map(_look, kept))
    # Where a buffer lies is asked for these only: it takes a while for arrays of many shards.
    alike = [value for value in leaving if _look(value) in looks]
    try:
        taken = {place for value in kept for place in _places(value)}
        shared = [value for value in alike if not taken.isdisjoint(_places(value))]
    except Exception:  # a backend that does not tell: all of these may share memory
        shared = alike
    spared = set(map(id, shared))
    for value in leaving:
        if id(value) not in spared:
            value.delete()


def _arrays(values: Iterable[Any]) -> list[jax.Array]:
    """The arrays that have the bytes: one of PRNG keys has one of key data inside."""
    import jax

    found = (getattr(v, "_base_array", v) for v in values if isinstance(v, jax.Array))
    return [array for array in found if not array.is_deleted()]


def _look(array: jax.Array) -> tuple[Any, ...]:
    """Equal for all arrays that have a buffer in common."""
    return array.sharding.shard_shape(array.shape), array.dtype


def _places(array: jax.Array) -> Iterator[tuple[int, int]]:
    """Device and address of each buffer here."""
    for shard in array.addressable_shards:
        yield shard.device.id, shard.data.unsafe_buffer_pointer()
