"""Those who save and restore: ours, Orbax as it comes and without compression, and two peers.

A side is used in a process of its own, for saving or for one restore. Its calls are what a user of
it would write; what is imported stands in `__init__`, which nobody times.
"""

from __future__ import annotations

import abc
import contextlib
import os
from pathlib import Path
from typing import Any, final

from tools.bench.worlds import Jax, Torch, World


class Side(abc.ABC):
    """Saves the steps of one run into a directory."""

    world: World

    @abc.abstractmethod
    def open(self) -> None:
        """Get ready to save."""

    @abc.abstractmethod
    def save(self, step: int, state: Any) -> None:
        """Returns as soon as the state may be donated."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Returns when the save is acknowledged: it would survive a crash of the machine."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Would `wait` return at once?"""

    @abc.abstractmethod
    def close(self) -> None:
        """No more saves."""

    @abc.abstractmethod
    def restore(self, step: int, template: Any) -> Any:
        """The newest step, which is `step`, from nothing but the directory."""


@final
class Lastgood(Side):
    """This project: one shared tier; the writer as it comes, or in a "thread" or "process"."""

    def __init__(
        self, directory: Path, devices: int, keep: int | None, writer: str | None = None
    ) -> None:
        import ckpt

        self.world = Jax(devices)
        self._directory, self._keep = directory, keep
        self._options: dict[str, Any] = {} if writer is None else {"writer": writer}
        self._new, self._shared, self._keeps = ckpt.CheckpointManager, ckpt.Shared, ckpt.Keep

    def _manager(self) -> Any:
        kept = self._keeps() if self._keep is None else self._keeps(last=self._keep)
        return self._new(self._shared(self._directory, keep=kept), **self._options)

    def open(self) -> None:
        self._open = self._manager()
        self._open.resume()

    def save(self, step: int, state: Any) -> None:
        self._pending = self._open.save(step, state)

    def wait(self) -> None:
        self._pending.wait()

    def done(self) -> bool:
        return bool(self._pending.done())

    def close(self) -> None:
        self._open.close()

    def restore(self, step: int, template: Any) -> Any:
        with self._manager() as manager:
            restored = manager.resume(like=template)
        assert restored.step == step
        return restored.state


@final
class Orbax(Side):
    """Orbax's manager, saving asynchronously."""

    def __init__(
        self, directory: Path, devices: int, keep: int | None, *, compressed: bool
    ) -> None:
        import orbax.checkpoint as ocp

        self.world = Jax(devices)
        self._ocp = ocp
        self._directory, self._keep, self._compressed = directory, keep, compressed

    def _manager(self) -> Any:
        options = self._ocp.CheckpointManagerOptions(max_to_keep=self._keep)
        if self._compressed:
            return self._ocp.CheckpointManager(self._directory, options=options)
        handler = self._ocp.PyTreeCheckpointHandler(use_compression=False)
        return self._ocp.CheckpointManager(self._directory, item_handlers=handler, options=options)

    def open(self) -> None:
        self._open = self._manager()

    def save(self, step: int, state: Any) -> None:
        args = self._ocp.args
        make = args.StandardSave if self._compressed else args.PyTreeSave
        self._open.save(step, args=make(state))

    def wait(self) -> None:
        self._open.wait_until_finished()

    def done(self) -> bool:
        return not self._open.is_saving_in_progress()

    def close(self) -> None:
        self._open.close()

    def restore(self, step: int, template: Any) -> Any:
        args = self._ocp.args
        with contextlib.closing(self._manager()) as manager:
            assert manager.latest_step() == step
            if self._compressed:
                return manager.restore(step, args=args.StandardRestore(template))
            targets = self._ocp.checkpoint_utils.construct_restore_args(template)
            wanted = args.PyTreeRestore(template, restore_args=targets)
            return manager.restore(step, args=wanted)


@final
class Dcp(Side):
    """PyTorch's distributed checkpoint in one process: `async_save`, files synced."""

    def __init__(self, directory: Path) -> None:
        import torch.distributed.checkpoint as dcp

        self.world = Torch()
        self._dcp, self._directory = dcp, directory

    def open(self) -> None:
        pass

    def save(self, step: int, state: Any) -> None:
        self._saved: Any = self._dcp.async_save(
            state, checkpoint_id=self._directory / str(step), no_dist=True
        )

    def wait(self) -> None:
        self._saved.result()

    def done(self) -> bool:
        return bool(self._saved.done())

    def close(self) -> None:
        pass

    def restore(self, step: int, template: Any) -> Any:
        self._dcp.load(template, checkpoint_id=self._directory / str(step), no_dist=True)
        return template


@final
class Safetensors(Side):
    """One file, written before `save` returns, then synced."""

    def __init__(self, directory: Path) -> None:
        import safetensors.torch as safetensors

        self.world = Torch()
        self._safetensors, self._directory = safetensors, directory

    def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Any) -> None:
        path = self._path(step)
        self._safetensors.save_file(state, path)
        for each in (path, path.parent):
            descriptor = os.open(each, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def restore(self, step: int, template: Any) -> Any:
        return self._safetensors.load_file(self._path(step))

    def _path(self, step: int) -> Path:
        return self._directory / f"{step}.safetensors"


OURS = "lastgood"
THREAD = "lastgood/thread"
PROCESS = "lastgood/process"
ORBAX = "orbax"
PLAIN_ORBAX = "orbax, no compression"
PEERS = ("torch dcp", "safetensors")
_WRITERS = {OURS: None, THREAD: "thread", PROCESS: "process"}


def side_of(name: str, directory: Path, devices: int, keep: int | None) -> Side:
    """The side of a name, for steps in `directory`."""
    if name in _WRITERS:
        return Lastgood(directory, devices, keep, _WRITERS[name])
    if name in (ORBAX, PLAIN_ORBAX):
        return Orbax(directory, devices, keep, compressed=name == ORBAX)
    return Dcp(directory) if name == PEERS[0] else Safetensors(directory)
