"""Who owns the directory of an arena: the lock, the places of arenas, and those left behind.

The kernel drops the lock when its owner dies, so an arena is stale when its lock can be had; no
process ids are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ckpt.errors import InUse, StoreFailed
from ckpt.slot_files import age_of, header_in, open_file, slot_name, slot_numbers

_SHARED_MEMORY = Path("/dev/shm")
_LOCK_NAME = "lock"
_FORMAT = "lastgood arena 1"
_WRITTEN_WITHIN_S = 60.0
_DYING_S = 5.0  # the kernel frees the memory of a killed process before it drops its locks
_MADE = stat.S_ISVTX  # of a directory made for an arena; unlike a file in it, never there too late
_EXITING = 0x4  # a flag of the kernel, in the ninth field of /proc/<pid>/stat
KEPT_S = 6 * 3600.0
"""How long the arena of a dead run is left for somebody who may come back for it."""


@dataclass(frozen=True)
class StaleArena:
    """An arena without a live owner."""

    directory: Path
    owner: dict[str, Any]
    size_bytes: int
    """What its slots occupy."""
    newest_ns: int = 0
    """When the newest snapshot in it was taken; without one, since when the arena was owned."""
    steps: tuple[int, ...] = ()
    """Of the snapshots in it, ascending."""

    def __str__(self) -> str:
        run = self.owner.get("run", "?")
        held = f"steps {', '.join(map(str, self.steps))}" if self.steps else "no snapshot"
        return f"{self.directory}: {self.size_bytes} bytes of the dead run {run}, with {held}"


def default_directory(location: str, process: int) -> Path:
    """Where the arena of a run at `location` lies: the same for every attempt on this host.

    In shared memory, else in the system's temporary directory. Makes this user's own directory
    there. Raises `StoreFailed` when that is not private.
    """
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    base = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
    mine = base / _default_parent()
    _make_private(mine)
    name = location if "://" in location else os.path.realpath(location)
    return mine / f"{xxhash.xxh3_64_hexdigest(os.fsencode(name))}-p{process}"


def stale_arenas(parent: str | Path) -> list[StaleArena]:
    """Arenas at `parent` or directly in it that no live process owns or reads from.

    Changes nothing.
    """
    return list(_each_stale(Path(parent)))


def remove_stale(
    parent: str | Path,
    *,
    keep: str | Path | None = None,
    older_than_s: float = KEPT_S,
    now_ns: Callable[[], int] = time.time_ns,
) -> list[StaleArena]:
    """Delete those that `stale_arenas` finds and nobody will come back for; returns them.

    Only an arena's own files are deleted, and its directory when it was made for the arena and is
    empty then.

    Args:
        keep: the directory of an arena that stays in any case: that of the caller's own run.
        older_than_s: younger ones stay, too; their runs may be started again.
    """
    before_ns = now_ns() - int(older_than_s * 1e9)
    kept = None if keep is None else Path(keep).absolute()
    return list(
        _each_stale(
            Path(parent),
            remove=lambda each: each.newest_ns < before_ns and each.directory.absolute() != kept,
        )
    )


def make_room(parent: str | Path, nbytes: int, *, keep: str | Path) -> list[StaleArena]:
    """Delete stale arenas, that with the oldest snapshot first, until `nbytes` are free there.

    All but `keep`, however young: a run that lives goes before one that is dead. When all of them
    together would not do, none is deleted. Returns those that were.
    """
    parent, kept = Path(parent), Path(keep).absolute()
    found = [each for each in stale_arenas(parent) if each.directory.absolute() != kept]
    if _free_bytes(parent) + sum(each.size_bytes for each in found) < nbytes:
        return []
    removed: list[StaleArena] = []
    for each in sorted(found, key=lambda each: each.newest_ns):
        if _free_bytes(parent) >= nbytes:
            break
        removed += _each_stale(each.directory, remove=functools.partial(_is_at, each.directory))
    return removed


def _is_at(directory: Path, arena: StaleArena) -> bool:
    return arena.directory == directory


def _free_bytes(place: Path) -> int:
    try:
        found = os.statvfs(place)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _each_stale(
    parent: Path, *, remove: Callable[[StaleArena], bool] | None = None
) -> Iterator[StaleArena]:
    """The stale ones; with `remove`, those for which it is true, and they are deleted."""
    for directory in (parent, *sorted(parent.glob("*"))):
        try:
            directory_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            lock_fd = open_file(directory, directory_fd, _LOCK_NAME, os.O_RDWR)
        except (OSError, StoreFailed):
            os.close(directory_fd)
            continue
        try:
            owner = _parse_owner(lock_fd)
            known = owner.get("format") == _FORMAT or _died_early(lock_fd, directory_fd)
            ours = os.fstat(directory_fd).st_uid == os.geteuid() and known
            # Its owner may be dead, and a writer of it at work on what lies there.
            if ours and _try_lock(lock_fd) and _try_lock(directory_fd):
                found = _look_at(directory, owner, lock_fd, directory_fd)
                if remove is None:
                    yield found
                elif remove(found):
                    remove_files(directory, directory_fd)
                    yield found
        finally:
            os.close(lock_fd)
            os.close(directory_fd)


def _look_at(directory: Path, owner: dict[str, Any], lock_fd: int, directory_fd: int) -> StaleArena:
    numbers = slot_numbers(directory_fd)
    blocks, images = 0, []
    for name in map(slot_name, numbers):
        with contextlib.suppress(OSError, StoreFailed):
            blocks += os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_blocks
            fd = open_file(directory, directory_fd, name, os.O_RDONLY)
            try:
                header = header_in(fd, name)
            finally:
                os.close(fd)
            if header is not None:
                images.append(age_of(header))
    since_ns = owner.get("since_ns")
    if not isinstance(since_ns, int):  # killed before it wrote this
        since_ns = os.fstat(lock_fd).st_mtime_ns if numbers else 0
    newest_ns = max((time_ns for time_ns, _ in images), default=0) or since_ns
    steps = tuple(sorted(step for _, step in images))
    return StaleArena(directory, owner, 512 * blocks, newest_ns, steps)


@dataclass(frozen=True)
class Owned:
    """The directory of an arena whose lock we hold; both descriptors are the holder's to close."""

    lock_fd: int
    directory_fd: int


def own(directory: Path, owner: dict[str, Any], *, is_here: bool) -> Owned:
    """Make the directory and take its lock.

    `owner` says who this is; `is_here`: a live arena of this process is known to be there.

    Raises:
        InUse: a live one holds it, named.
        StoreFailed: it cannot be made, or is not private to this user.
    """
    error = None
    for _ in range(100):  # an owner that leaves may remove it between any two of these calls
        try:
            _make_private(directory)
            found = _try_to_own(directory, owner, is_here=is_here)
        except FileNotFoundError as absent:
            error = absent
            continue
        if found is not None:
            return found
    raise StoreFailed(f"{directory}: cannot be made, or vanishes each time: {error}") from error


def _try_to_own(directory: Path, owner: dict[str, Any], *, is_here: bool) -> Owned | None:
    """None when the directory was removed meanwhile; nothing stays open then, or after an error."""
    with contextlib.ExitStack() as opened:
        directory_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.callback(os.close, directory_fd)
        lock_fd = open_file(directory, directory_fd, _LOCK_NAME, os.O_RDWR | os.O_CREAT)
        opened.callback(os.close, lock_fd)
        if not (_patiently(lock_fd) or (not is_here and _after_a_death(lock_fd))):
            other = _read_owner(lock_fd)
            text = _describe(other)
            if "run" in other and other["run"] != owner.get("run"):
                raise InUse(
                    f"{directory} is held by a live manager of another run: {text}; the arenas of "
                    "two runs need two directories"
                )
            if is_here:
                raise InUse(
                    f"{directory} is held by another manager of this run in this process: {text}; "
                    "close() that one first, or use it (a notebook cell that ran twice made two)"
                )
            raise InUse(
                f"{directory} is held by a live manager of this run: {text}; stop that one first, "
                "or give this run another location"
            )
        if not _is_current(lock_fd, directory, directory_fd):
            return None
        text = _owner_text(owner)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, text.encode(), 0)
        opened.pop_all()
        return Owned(lock_fd, directory_fd)


def _is_current(lock_fd: int, directory: Path, directory_fd: int) -> bool:
    """Whether the lock that we hold is still the one under this path, not one just removed."""
    try:
        lock, at = os.stat(_LOCK_NAME, dir_fd=directory_fd), os.stat(directory)
    except FileNotFoundError:
        return False
    return os.path.samestat(lock, os.fstat(lock_fd)) and os.path.samestat(
        at, os.fstat(directory_fd)
    )


def _default_parent() -> str:
    return f"lastgood-{os.getuid()}"


def _make_private(directory: Path) -> None:
    """Make it, or check that it is ours alone; `FileNotFoundError` when it was just removed.

    One that is made here bears `_MADE`.
    """
    try:
        for ancestor in reversed(directory.parents):  # each private: `parents=True` makes them open
            with contextlib.suppress(FileExistsError):
                if not ancestor.exists():
                    ancestor.mkdir(mode=0o700)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700 | _MADE)
        found = os.lstat(directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreFailed(f"{directory}: cannot make this directory: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreFailed(
            f"{directory}: wanted a directory of user {os.geteuid()} with mode 0700, found "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; remove it or give another"
        )


def remove_files(directory: Path, directory_fd: int) -> None:
    """Delete the arena's files, the lock last, while the lock is held.

    And the directory, when it was made for an arena and is empty then.
    """
    for name in (*map(slot_name, slot_numbers(directory_fd)), _LOCK_NAME):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # no file of ours is one
            os.unlink(name, dir_fd=directory_fd)
    if os.fstat(directory_fd).st_mode & _MADE:
        with contextlib.suppress(OSError):  # something foreign lies in it: not ours to delete
            directory.rmdir()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _patiently(fd: int) -> bool:
    """`_try_lock`; somebody who only looks for what the dead left behind lets go at once."""
    for _ in range(8):
        if _try_lock(fd):
            return True
        time.sleep(0.02)
    return _try_lock(fd)


def _after_a_death(fd: int) -> bool:
    """`_try_lock` while its owner is dying: the kernel frees its memory first, for seconds."""
    end = time.monotonic() + _DYING_S
    while _is_dying(_parse_owner(fd)) and time.monotonic() < end:
        if _try_lock(fd):
            return True
        time.sleep(0.02)
    return _try_lock(fd)


def _is_dying(owner: dict[str, Any]) -> bool:
    """Whether the process that has a lock can be seen to be dead, or about to be."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or owner.get("host") != socket.gethostname():
        return False
    found = _stat_of(pid)
    if found is None:
        return True
    started = owner.get("started")
    flags = int(found[6])
    return (
        found[0] in ("Z", "X")
        or bool(flags & _EXITING)
        or (isinstance(started, int) and int(found[19]) != started)
    )


def _stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _owner_text(owner: dict[str, Any]) -> str:
    known: dict[str, Any] = {"format": _FORMAT, "pid": os.getpid(), "host": socket.gethostname()}
    if (own_stat := _stat_of(os.getpid())) is not None:
        known["started"] = int(own_stat[19])  # a pid is used again, at another time
    return json.dumps({**known, "since_ns": time.time_ns(), **owner})


def _read_owner(fd: int) -> dict[str, Any]:
    """What the lock says about its live owner; empty when it says nothing."""
    for _ in range(20):
        if owner := _parse_owner(fd):
            return owner
        time.sleep(0.005)  # its owner has the lock and is about to write this
    return {}


def _parse_owner(fd: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        owner = json.loads(os.pread(fd, 65536, 0))
        if isinstance(owner, dict):
            return owner
    return {}


def _died_early(lock_fd: int, directory_fd: int) -> bool:
    """Whether an owner was killed before it wrote who it is: an old empty lock, nothing else."""
    found = os.fstat(lock_fd)
    old = time.time() - found.st_mtime > _WRITTEN_WITHIN_S
    return old and found.st_size == 0 and os.listdir(directory_fd) == [_LOCK_NAME]


def _describe(owner: dict[str, Any]) -> str:
    since_ns = owner.get("since_ns")
    since = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since_ns / 1e9))
        if isinstance(since_ns, int)
        else "?"
    )
    pid, host, run = (owner.get(key, "?") for key in ("pid", "host", "run"))
    return f"pid {pid} on host {host}, run {run}, since {since}"
