"""Ways to iterate, and several threads that do it."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from memory_source import Records, number


class Slow(Records):
    """Reads let other threads in."""

    def read(self, indices):
        time.sleep(0.0005)
        return super().read(indices)


def device():
    return {"sharding": SingleDeviceSharding(jax.devices()[1])}


def small(record):
    return np.int32(number(record))


def hang(record):
    time.sleep(1000)


WAYS = {
    "plain": lambda: {"prefetch": 0},
    "threads": lambda: {"prefetch": 3, "threads": 2, "window": 2},
    "devices": lambda: {"prefetch": 3, "window": 2, **device()},
    "workers": lambda: {"workers": 2, "window": 2},
    "workers and devices": lambda: {"workers": 2, "window": 2, **device()},
}


def in_threads(count, call):
    """Calls it in so many threads at once, and raises what any of them raised."""
    errors = []

    def run(index):
        try:
            call(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
