"""The slots of an arena as a writer sees them: files that are read under a shared lock.

A slot is filled under an exclusive lock of its file. So whoever reads here never reads what is
being overwritten, be it that its trainer has died, sleeps, or is a new one that knows nothing of
this reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, final

from ckpt.errors import Damaged, NotFound, StoreFailed, Unsupported
from ckpt.grid import PAGE_BYTES
from ckpt.image import Header, decode
from ckpt.lineage import StepId
from ckpt.owning import slot_name, slot_numbers

_TRIES = 5


def step_of(header: Header) -> StepId:
    """Whose image it is. Raises Damaged for one that does not say so."""
    numbers = [header.meta.get(name) for name in ("step", "branch", "attempt")]
    if not all(type(number) is int for number in numbers):
        raise Damaged(f"{header.where}: wanted the image of a step, found (step, ...) = {numbers}")
    return StepId(*numbers)  # type: ignore[arg-type]


@final
class Slots:
    """The slot files in the directory of an arena, kept mapped: page tables are dear.

    Until `close` the directory is under a shared lock: when the owner of the arena has died, it is
    not given up while somebody may still read from it, be it a slot that nobody reads right now.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._hold: int | None = None
        """A descriptor of the directory."""
        with contextlib.suppress(NotFound, StoreFailed, OSError), self._directory() as opened:
            self._hold = os.dup(opened)
            fcntl.flock(self._hold, fcntl.LOCK_SH)
        _open.add(self)
        self._lock = threading.Lock()
        self._known: dict[int, _Mapped] = {}

    @contextlib.contextmanager
    def reading(self, slot: int, step: StepId) -> Iterator[tuple[Header, memoryview]]:
        """The image (u8, read-only) in a slot, which is not filled anew meanwhile.

        Waits while it is being filled.

        Raises:
            Damaged: the slot has no image, or that of another step.
            NotFound: there is no such slot.
            StoreFailed: it cannot be read, or is not of this user alone.
        """
        found = self._locked(slot, wait=True)
        assert found is not None
        try:
            header = found.header()
            if (there := step_of(header)) != step:
                raise Damaged(f"{found.path}: wanted {step}, found {there}: it was filled anew")
            yield header, memoryview(found.mapping)[: header.size_bytes]
        finally:
            found.unlock()

    def valid(self) -> list[tuple[int, Header]]:
        """Slots whose header and table are intact and that nobody is filling, by number."""
        with self._directory() as directory:
            numbers = slot_numbers(directory)
        images = []
        for number in numbers:
            with contextlib.suppress(Damaged, Unsupported, NotFound):
                found = self._locked(number, wait=False)
                if found is not None:
                    try:
                        images.append((number, found.header()))
                    finally:
                        found.unlock()
        return images

    def close(self) -> None:
        """Let go of all files; those that are being read, once they are not."""
        with self._lock:
            for known in self._known.values():
                known.retire()
            self._known.clear()
            self.let_go()

    def let_go(self) -> None:
        """Of the directory."""
        hold, self._hold = self._hold, None
        if hold is not None:
            os.close(hold)

    def _locked(self, slot: int, *, wait: bool) -> _Mapped | None:
        """The file of the slot as it is now, locked; None if that would have to be waited for."""
        path = self.directory / slot_name(slot)
        for _ in range(_TRIES):
            found = self._mapped(slot, path)
            locked = found.lock(wait=wait)
            if locked == "filled":
                return None
            if locked == "retired":  # nothing was locked: there is nothing to unlock
                continue
            # While it was waited for, it may have been replaced, or have grown.
            try:
                if found.stamp == _stamp(os.stat(path, follow_symlinks=False)):
                    return found
            except FileNotFoundError:
                found.unlock()
                raise NotFound(f"{path}: there is no such slot any more") from None
            found.unlock()
        raise Damaged(f"{path}: replaced time and again while it was opened")

    def _mapped(self, slot: int, path: Path) -> _Mapped:
        with self._lock, self._directory() as directory:
            try:
                known = self._known.get(slot)
                at = os.stat(slot_name(slot), dir_fd=directory, follow_symlinks=False)
                if known is not None:
                    if known.stamp == _stamp(at):
                        return known
                    known.retire()
                    del self._known[slot]
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                fd = os.open(slot_name(slot), flags, dir_fd=directory)
                try:
                    self._known[slot] = made = _Mapped(fd, path)
                except BaseException:
                    os.close(fd)
                    raise
            except FileNotFoundError as error:
                raise NotFound(f"{path}: there is no such slot") from error
            except OSError as error:
                raise StoreFailed(f"{path}: cannot open this slot: {error}") from error
            return made

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        try:
            fd = os.open(self.directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"{self.directory}: there is no arena") from error
        except OSError as error:
            raise StoreFailed(f"{self.directory}: cannot open this arena: {error}") from error
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise StoreFailed(
                    f"{self.directory}: wanted a directory of user {os.geteuid()} with mode 0700, "
                    f"found {stat.filemode(found.st_mode)} of user {found.st_uid}"
                )
            yield fd
        finally:
            os.close(fd)


_open: weakref.WeakSet[Slots] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A fork shares the lock of the directory, which would outlive this process."""
    for slots in list(_open):
        slots.let_go()


os.register_at_fork(after_in_child=_forget_in_child)

_Stamp = tuple[int, int, int]


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_dev, found.st_ino, found.st_size


@final
class _Mapped:
    """An open slot file, its mapping, and how many read it. Owns the descriptor."""

    def __init__(self, fd: int, path: Path) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            kind = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
            raise Damaged(f"{path}: wanted a file of user {os.geteuid()}, found {kind}")
        if found.st_size < PAGE_BYTES:
            raise Damaged(f"{path}: wanted an image, found {found.st_size} bytes")
        self.path = path
        self.stamp = _stamp(found)
        self.mapping = mmap.mmap(fd, found.st_size, access=mmap.ACCESS_READ)
        self._fd = fd
        self._turn = threading.Lock()
        self._readers = 0
        self._retired = False
        self._page = b""
        self._header: Header | None = None

    def lock(self, *, wait: bool) -> Literal["locked", "filled", "retired"]:
        """One reader more, who has to `unlock`; none if the file is being filled, or retired."""
        with self._turn:
            if self._retired:
                return "retired"
            if self._readers == 0:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    return "filled"
            self._readers += 1
            return "locked"

    def unlock(self) -> None:
        """A reader that has locked it has ended."""
        with self._turn:
            assert self._readers, "unlocked more often than locked"
            self._readers -= 1
            if self._readers == 0:
                # Said, not left to the close: the mapping has a descriptor of the same lock.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                if self._retired:
                    os.close(self._fd)

    def retire(self) -> None:
        """The file is not in its place any more: close it when nobody reads it."""
        with self._turn:
            if not self._retired:
                self._retired = True
                if self._readers == 0:
                    os.close(self._fd)

    def header(self) -> Header:
        """Of the image in it. A page that was seen before stands for the same table."""
        page = bytes(self.mapping[:PAGE_BYTES])
        header = self._header
        if header is None or page != self._page:
            mapping = self.mapping
            header = decode(lambda at, n: mapping[at : at + n], len(mapping), str(self.path))
            self._page, self._header = page, header
        return header
