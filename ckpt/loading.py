"""How a restore uses memory and threads, and who is told how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import Misuse


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
    leaf is known to match what was saved, and before any value is read. NumPy arrays stay, and so
    do leaves that keep their value because of `fit`. Nothing is deleted where nothing is there to
    restore, nor for a step that raises `Mismatch`. After another error `like` is gone, and it is
    gone when a damaged step has made way for an older one; as a template it still serves. Among
    several processes each looks at its own leaves only."""
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
    """Delete the jax arrays among `going`, except those that are among `staying`, too."""
    import jax

    kept = {id(_memory(value)) for value in staying}
    for value in going:
        if isinstance(value, jax.Array) and id(_memory(value)) not in kept:
            value.delete()


def _memory(value: Any) -> Any:
    """The array that has the bytes: an array of PRNG keys has an array of key data inside."""
    return getattr(value, "_base_array", value)
