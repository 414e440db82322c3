"""Who owns the directory of an arena: the lock, the places of arenas, and those left behind.

The kernel drops the lock when its owner dies, so an arena is stale when its lock can be had; no
process ids are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ckpt.errors import InUse, StoreFailed

_SHARED_MEMORY = Path("/dev/shm")
_SLOT_NAME = re.compile(r"slot-(0|[1-9][0-9]{0,3})")
_LOCK_NAME = "lock"
_FORMAT = "lastgood arena 1"
_WRITTEN_WITHIN_S = 60.0
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class StaleArena:
    """An arena without a live owner. `size_bytes` is what its slots occupy."""

    directory: Path
    owner: dict[str, Any]
    size_bytes: int


def default_directory(location: str, process: int) -> Path:
    """Where the arena of a run at `location` lies: the same for every attempt on this host.

    In shared memory, else in the system's temporary directory. Makes this user's own directory
    there. Raises `StoreFailed` when that is not private.
    """
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    base = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
    mine = base / f"lastgood-{os.getuid()}"
    _make_private(mine)
    name = location if "://" in location else os.path.realpath(location)
    return mine / f"{xxhash.xxh3_64_hexdigest(os.fsencode(name))}-p{process}"


def stale_arenas(parent: str | Path) -> list[StaleArena]:
    """Arenas at `parent` or directly in it that no live process owns; changes nothing."""
    return list(_each_stale(Path(parent), remove=False))


def remove_stale(parent: str | Path) -> list[StaleArena]:
    """Delete the arenas that `stale_arenas` finds, and the snapshots in them; returns them.

    Only an arena's own files are deleted, and its directory when that is empty then.
    """
    return list(_each_stale(Path(parent), remove=True))


def _each_stale(parent: Path, *, remove: bool) -> Iterator[StaleArena]:
    for directory in (parent, *sorted(parent.glob("*"))):
        try:
            directory_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            lock_fd = os.open(_LOCK_NAME, _FLAGS, dir_fd=directory_fd)
        except OSError:
            os.close(directory_fd)
            continue
        try:
            owner = _parse_owner(lock_fd)
            known = owner.get("format") == _FORMAT or _died_early(lock_fd, directory_fd)
            ours = os.fstat(directory_fd).st_uid == os.geteuid() and known
            if ours and _try_lock(lock_fd):
                numbers = slot_numbers(directory_fd)
                blocks = [
                    os.stat(slot_name(k), dir_fd=directory_fd, follow_symlinks=False).st_blocks
                    for k in numbers
                ]
                if remove:
                    remove_files(directory, directory_fd)
                yield StaleArena(directory, owner, 512 * sum(blocks))
        finally:
            os.close(lock_fd)
            os.close(directory_fd)


def own(directory: Path, owner: dict[str, Any], *, is_here: bool) -> tuple[int, int]:
    """Make the directory and take its lock; returns the descriptors of lock and directory.

    `owner` says who this is; `is_here`: a live arena of this process is known to be there.

    Raises:
        InUse: a live one holds it, named.
        StoreFailed: it cannot be made, or is not private to this user.
    """
    error = None
    for _ in range(100):  # an owner that leaves may remove it between any two of these calls
        try:
            found = _try_to_own(directory, owner, is_here=is_here)
        except FileNotFoundError as absent:
            error = absent
            continue
        if found is not None:
            return found
    raise StoreFailed(f"{directory}: cannot be made, or vanishes each time: {error}") from error


def _try_to_own(directory: Path, owner: dict[str, Any], *, is_here: bool) -> tuple[int, int] | None:
    """None when the directory was removed meanwhile; nothing stays open then, or after an error."""
    _make_private(directory)
    with contextlib.ExitStack() as opened:
        directory_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.callback(os.close, directory_fd)
        try:
            lock_fd = os.open(_LOCK_NAME, _FLAGS | os.O_CREAT, 0o600, dir_fd=directory_fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreFailed(f"{directory}: cannot open its lock: {error}") from error
        opened.callback(os.close, lock_fd)
        if not _patiently(lock_fd):
            text = _describe(_read_owner(lock_fd))
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
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, _owner_text(owner).encode(), 0)
        opened.pop_all()
        return lock_fd, directory_fd


def _is_current(lock_fd: int, directory: Path, directory_fd: int) -> bool:
    """Whether the lock that we hold is still the one under this path, not one just removed."""
    try:
        lock, at = os.stat(_LOCK_NAME, dir_fd=directory_fd), os.stat(directory)
    except FileNotFoundError:
        return False
    return os.path.samestat(lock, os.fstat(lock_fd)) and os.path.samestat(
        at, os.fstat(directory_fd)
    )


def _make_private(directory: Path) -> None:
    """Make it, or check that it is ours alone; `FileNotFoundError` when it was just removed."""
    try:
        for ancestor in (*reversed(directory.parents), directory):
            with contextlib.suppress(FileExistsError):
                if not ancestor.exists():
                    ancestor.mkdir(mode=0o700)
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
    """Delete the arena's files, the lock last, while the lock is held."""
    for name in (*map(slot_name, slot_numbers(directory_fd)), _LOCK_NAME):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory_fd)
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


def _owner_text(owner: dict[str, Any]) -> str:
    known = {"format": _FORMAT, "pid": os.getpid(), "host": socket.gethostname()}
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


def slot_name(number: int) -> str:
    return f"slot-{number}"


def slot_numbers(directory_fd: int) -> list[int]:
    matches = map(_SLOT_NAME.fullmatch, os.listdir(directory_fd))
    return sorted(int(match[1]) for match in matches if match)
