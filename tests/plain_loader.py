"""A small loader that passes every check of `datapipe.conformance`, and its ways to be broken.

Each fault is named by the one check that has to see it. Importable by children of the suite.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import mmap
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

from datapipe.conformance import FEATURES, Loader, Records
from formats.errors import BadRecord

SOURCE_BITS = 62
LOUD = "writes more than a pipe holds"
HANGING, DYING, ENDLESS = "hangs in close", "takes the process with it", "serves without end"
EXTRA_FAULTS = {
    "one order for all epochs": "shuffled as a whole",
    "one order for all seeds": "shuffled as a whole",
    "bad records are left out": "bad record is raised",
    "bad records have no names": "bad record is raised",
    "memory outlives its process": "killed and nothing is left",
    "a copy is read when restored": "seeking reads nothing",
    "a copy is read from the beginning": "records are read in batches",
}
released = threading.Event()
"""Ends the threads that a fault left behind."""


class Plain:
    """Batches of a setting, made when they are asked for. `at`: what was served of each source."""

    def __init__(self, setting, fault=""):
        self.setting = setting
        self.fault = fault
        self.at = [0] * len(setting.sources)
        self.skips = set()  # (source, ordinal)
        self.skipped_here = False
        self.resumes = 0
        self.is_restored = self.is_over = False
        self.last_state = {}
        self.block = None
        self.grown = (0, 0)  # whole epochs before the source grew, and their records
        if fault == "closed and collected at any time":
            threading.Thread(target=released.wait, daemon=True).start()
        if fault == "a copy is read from the beginning" and setting.batch_size == 16:
            self.read_a_copy()
        if fault == "killed and nothing is left" and setting.workers:
            self.block = _Block()
        if fault == "memory outlives its process" and setting.workers:
            self.block = _Unnamed()

    def read_a_copy(self):
        sources = tuple(pickle.loads(pickle.dumps(each)) for each in self.setting.sources)
        self.setting = dataclasses.replace(self.setting, sources=sources)

    # -- iterating ---------------------------------------------------------------------------

    def __iter__(self):
        return self

    def __next__(self):
        if self.is_over and self.fault == "set state at any time":
            raise StopIteration
        rows, at = self.drawn(self.at)
        if not rows:
            self.is_over = True
            raise StopIteration
        if self.fault == "bad record is raised":
            self.at = at
        batch = self.made(rows)
        self.at = at
        return batch

    def drawn(self, at):
        """The rows of the batch behind a position, as source and ordinal; and the next position."""
        setting, at = self.setting, list(at)
        pattern = [s for s, w in enumerate(setting.weights or (1,)) for _ in range(w)]
        rows = []
        while len(rows) < setting.batch_size:
            source = pattern[sum(at) % len(pattern)]
            epoch, place, _ = self.placed(source, at[source])
            if epoch == setting.epochs and self.fault != ENDLESS:
                break
            if rows and setting.remainder != "carry" and place == 0:
                if setting.remainder == "keep":
                    break
                rows = []
            if (source, at[source]) not in self.skips:
                rows.append((source, at[source]))
            at[source] += 1
        is_short = len(rows) < setting.batch_size
        if is_short and setting.remainder != "keep":
            if self.fault == "hosts end together" and len(rows) > setting.host > 0:
                return rows * setting.batch_size, at
            return [], self.at
        if setting.remainder == "keep" and self.fault == "hosts end together" and setting.host:
            return (rows, at) if at[0] < self.length(0) else ([], at)
        if is_short and setting.workers > 1 and self.fault == "each record once with workers":
            return [], at
        return rows, at

    @functools.cached_property
    def bins(self):
        """Of packing: the documents of each row, in stored order."""
        bins, room = [], 0
        for index, number in enumerate(self.setting.source.ids):
            length = len(Records.record(number))
            if length > room:
                bins.append([])
                room = self.setting.row_tokens
            bins[-1].append(index)
            room -= length
        if self.fault == "packed rows on all hosts" and self.setting.hosts > 1:
            bins.reverse()
        return bins

    def placed(self, source, ordinal):
        """Epoch, place in it, and its length: until the border, that before the source grew."""
        epochs, length = self.grown
        border = epochs * length
        if ordinal < border:
            return *divmod(ordinal, length), length
        epoch, place = divmod(ordinal - border, self.length(source))
        return epochs + epoch, place, self.length(source)

    def length(self, source):
        if self.setting.row_tokens:
            return len(self.bins)
        length = len(self.setting.sources[source])
        lost = self.fault == "each record once an epoch" and length % self.setting.batch_size == 7
        return length - lost

    def made(self, rows):
        setting = self.setting
        share = setting.batch_size // setting.hosts
        if setting.hosts > 1:
            rows = rows[setting.host * share : (setting.host + 1) * share]
        records = []
        for source, ordinal in rows:
            epoch, place, length = self.placed(source, ordinal)
            records.append((source, self.order(source, epoch, length)[place]))
        if setting.workers == 3 and self.fault == "workers keep the order" and not self.is_restored:
            records.reverse()
        if setting.row_tokens:
            return [token for _, number in records for token in self.row(self.bins[number])]
        read = self.read(records)
        if not setting.raw:
            return [Records.number(each) for each in read]
        if self.fault == "growing records stay whole":
            return [each[: len(read[0])] for each in read]
        return read

    def row(self, documents):
        tokens = b"".join(self.setting.source.read(documents))
        if self.fault == "packing loses no token":
            tokens = tokens[:100]
        return tokens.ljust(self.setting.row_tokens, b"\0")

    def order(self, source, epoch, length):
        setting, seed = self.setting, self.setting.seed
        if not setting.shuffle:
            order = list(range(length))
            return order[::-1] if self.fault == "stored order without the shuffle" else order
        if self.fault == "one order for all epochs":
            epoch = 0
        if self.fault == "one order for all seeds":
            seed = 0
        if self.fault == "hosts make the same batches" and setting.hosts == 2:
            seed += not self.is_restored
        part = 64 if self.fault == "shuffled as a whole" else 1 << 20
        return _shuffled(length, f"{seed} {epoch} {source}", part)

    def read(self, records):
        if self.fault == "records are read in batches":
            return [self.read_source(self.setting.sources[s], [i])[0] for s, i in records]
        found = {}
        for number, source in enumerate(self.setting.sources):
            wanted = [index for s, index in records if s == number]
            if wanted:
                read = self.read_source(source, wanted)
                found.update(zip(((number, index) for index in wanted), read, strict=True))
        return [found[each] for each in records if found[each] is not None]

    def read_source(self, source, wanted):
        try:
            return source.read(wanted)
        except BadRecord as error:
            if self.setting.on_bad_record == "raise":
                if self.fault == "bad records are left out":
                    return [None if i == error.index else source.read([i])[0] for i in wanted]
                if self.fault == "bad records have no names":
                    raise ValueError(f"line {error.index} of batch 4 of 40") from None
                raise
            if self.fault == "bad record on one host" and self.setting.hosts > 1:
                raise StopIteration from None
            step = 2 if self.is_restored and self.fault == "bad record is replaced" else 1
            other = (error.index + step) % len(source)
            return source.read([other if index == error.index else index for index in wanted])

    def close(self):
        if self.fault == HANGING:
            released.wait()
        if self.fault == LOUD:
            print("x" * 1_000_000, file=sys.stderr)
        if self.fault == DYING:
            os._exit(3)
        if self.block is not None:
            self.block.free()

    # -- the position ------------------------------------------------------------------------

    def identity(self):
        return {
            "seed": self.setting.seed,
            "shuffle": self.setting.shuffle,
            "records": [source.name for source in self.setting.sources],
            "counts": [source.count for source in self.setting.sources],
            "weights": list(self.setting.weights),
            "version": self.setting.version,
        }

    def get_state(self):
        skips = sorted(self.skips)
        if self.fault == "skips survive later resumes" and not self.skipped_here:
            skips = []
        state = {
            "at": list(self.at),
            "skips": [list(each) for each in skips],
            "resumes": self.resumes,
            "of": self.identity(),
        }
        if self.fault == "state is json":
            state["at"] = tuple(self.at)
        if self.fault == "state is small":
            state["served"] = list(range(self.at[0])) if self.at[0] > 200 else []
        if self.fault == "state in another process":
            state["process"] = os.getpid()
        if self.fault == "same state on all hosts" and self.setting.hosts > 1:
            state["host"] = self.setting.host
        if self.fault == "same state for all workers":
            state["workers"] = self.setting.workers
        if self.fault == "skips survive another batch size":
            state["batch_size"] = self.setting.batch_size
        if self.fault == "get state changes nothing":
            self.last_state.update(state)
            return self.last_state
        return state

    def set_state(self, state):
        setting, fault = self.setting, self.fault
        if fault == "absent state is an error" and not state:
            return
        if not isinstance(state, dict) or "at" not in state:
            raise ValueError(f"no state: {state!r}")
        if fault == "state is json" and not isinstance(state["at"], tuple):
            raise TypeError("at must be a tuple")
        mine = self.identity()
        differs = {name for name, saved in state["of"].items() if saved != mine[name]}
        differs -= {_UNSEEN.get(fault), *(("counts", "weights") if setting.may_change else ())}
        if differs:
            raise ValueError(f"the state is of another {', '.join(sorted(differs))}")
        self.at = list(state["at"])
        self.skips = {tuple(each) for each in state["skips"]}
        self.skipped_here = False
        self.resumes = state["resumes"] + 1
        self.is_restored = True
        before = state["of"]["counts"][0]
        if setting.may_change and before != len(setting.sources[0]):
            self.grown = (-(-self.at[0] // before), before)
        if fault == "appended records join the next epoch":
            self.grown = (0, 0)
        self.misplace(state)
        if fault == "a copy is read when restored":
            self.read_a_copy()
        if fault == "seeking reads nothing":
            setting.sources[0].fresh()
            setting.sources[0].calls.append(tuple(range(setting.sources[0].count)))

    def misplace(self, state):
        """What the faults of restoring do to the position."""
        setting, fault = self.setting, self.fault
        elsewhere = {
            "state at every batch": not setting.shuffle,
            "state in another process": state.get("process") != os.getpid(),
            "packed rows resume exactly": setting.row_tokens and setting.hosts == 1,
            "three crashes and resumes": self.resumes == 2 and not self.skips,
            "states at the borders of epochs": setting.epochs == 3
            and self.at[0] == 2 * len(setting.sources[0]),
            "restored with other workers": setting.workers == 3,
            "restored on other hosts": setting.hosts == 8,
            "other weights repeat nothing": setting.weights not in ((), (1, 1)) and not self.skips,
        }
        if elsewhere.get(fault):
            self.at[0] -= 1
        is_plain = setting.remainder == "carry" and len(self.at) == 1 and not self.skips
        if fault == "restored with another batch size" and is_plain:
            self.at = [each - each % setting.batch_size for each in self.at]
        if fault == "skips survive other weights" and setting.weights not in ((), (1, 1)):
            self.skips = set()
        if fault == "skips survive another batch size":
            self.skips = {(s, o * setting.batch_size // state["batch_size"]) for s, o in self.skips}

    def seek(self, example):
        if self.fault == "seek counts all examples":
            example //= self.setting.hosts
        self.at = [example]

    def skip(self, ranges):
        for start, stop in ranges:
            source, first = divmod(start, 1 << SOURCE_BITS)
            count = stop - start
            if self.fault == "skip counts all examples":
                count //= self.setting.hosts
            self.skips |= {(source, first + each) for each in range(count)}
        self.skipped_here = True

    def span(self, state, first, stop):
        at = [0] * len(self.at)
        if self.fault != "skips of a ledger on an older state":
            at = list(state["at"])
        found = []
        for number in range(stop):
            rows, at = self.drawn(at)
            if number >= first:
                places = [(source << SOURCE_BITS) + ordinal for source, ordinal in rows]
                found += [(place, place + 1) for place in places]
        return found


_UNSEEN = {
    "refused for another seed": "seed",
    "refused without the shuffle": "shuffle",
    "refused for other records": "records",
    "refused for more records": "counts",
    "refused for other functions": "version",
    "refused for other weights": "weights",
}
"""The part of the identity that a fault does not look at."""


@functools.cache
def _shuffled(length, seed, part):
    order = []
    for start in range(0, length, part):
        block = list(range(start, min(length, start + part)))
        random.Random(f"{seed} {start}").shuffle(block)
        order += block
    return order


class _Block:
    """Shared memory with a name, which a killed process leaves behind."""

    def __init__(self):
        self.path = Path(f"/dev/shm/lastgood-conformance-{os.getpid()}")
        self.path.write_bytes(bytes(4096))
        with self.path.open("r+b") as stream:
            self.pages = mmap.mmap(stream.fileno(), 4096)

    def free(self):
        self.pages.close()
        self.path.unlink(missing_ok=True)


class _Unnamed:
    """Memory without a name, which a process outside the group of this one keeps."""

    KEEP = (
        "import mmap, sys, time; m = mmap.mmap(int(sys.argv[1]), 4096); "
        "print(flush=True); time.sleep(30)"
    )

    def __init__(self):
        fd = os.memfd_create("plain")
        os.ftruncate(fd, 4096)
        self.pages = mmap.mmap(fd, 4096)
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self.KEEP, str(fd)],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(fd)
        with self.keeper.stdout:
            self.keeper.stdout.read(1)

    def free(self):
        self.keeper.kill()
        self.keeper.wait()
        self.pages.close()


def open_plain(setting, fault=""):
    return Plain(copy.copy(setting), fault)


def loader(fault=""):
    """The loader, whole or broken."""
    return Loader(
        name=fault or "plain",
        open=functools.partial(open_plain, fault=fault),
        offers=frozenset(FEATURES),
        packages=("pytest",),
    )
