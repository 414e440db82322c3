"""Batches as global arrays: on several devices, and in several processes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from memory_source import Records, number
from number_batches import columns, numbers

from datapipe import Misuse, Pipeline
from datapipe.prefetch.device_feed import needed

HERE = Path(__file__).parent


def mesh(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")[: len(shape)])


@pytest.mark.parametrize(
    "sharding",
    [
        NamedSharding(mesh(8), PartitionSpec("data")),
        NamedSharding(mesh(4, 2), PartitionSpec("data")),
        NamedSharding(mesh(2, 4), PartitionSpec("model")),
        NamedSharding(mesh(4, 2), PartitionSpec(("data", "model"))),
        NamedSharding(mesh(8), PartitionSpec()),
        SingleDeviceSharding(jax.devices()[3]),
    ],
    ids=str,
)
def test_global_arrays_hold_the_same_batch(sharding):
    wanted = list(columns(16))
    with columns(16).iterator(sharding=sharding) as iterator:
        batches = list(iterator)
    for batch, plain in zip(batches, wanted, strict=True):
        for name, leaf in batch.items():
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            assert leaf.dtype == plain[name].dtype
            np.testing.assert_array_equal(leaf, plain[name])


def test_axes_behind_the_batch_may_be_sharded_too():
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("data", "model"))
    pipe = columns(16).map_batch(lambda b: b["row"], version="1")
    first = next(pipe.iterator(sharding=sharding))
    np.testing.assert_array_equal(first, next(pipe.iterator()))
    with pytest.raises(Misuse, match=r"\['id'\] of shape \[16\] cannot be sharded"):
        next(columns(16).iterator(sharding=sharding))


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_hosts_together_read_each_row_once(hosts):
    """What each of several hosts would read, without the hosts."""
    sharding = NamedSharding(mesh(8), PartitionSpec("data"))
    parts = sharding.devices_indices_map((16,))
    per_host = 8 // hosts
    rows = [
        needed([parts[d][0] for d in jax.devices()[h * per_host : (h + 1) * per_host]], 16)
        for h in range(hosts)
    ]
    assert np.concatenate(rows).tolist() == list(range(16))
    replicated = NamedSharding(mesh(4, 2), PartitionSpec("model")).devices_indices_map((16,))
    assert needed([part[0] for part in replicated.values()], 16).tolist() == list(range(16))


def test_integers_are_narrowed_only_where_they_fit():
    sharding = NamedSharding(mesh(8), PartitionSpec("data"))
    pipe = Pipeline(Records(16), batch_size=8, seed=1).map(number, version="1")
    first = next(pipe.iterator(sharding=sharding))
    assert first.dtype == np.int32
    assert first.tolist() == next(pipe.iterator()).tolist()
    big = pipe.map(lambda n: {"big": n + 2**31}, version="1").iterator(sharding=sharding)
    with pytest.raises(Misuse, match=r"\['big'\] holds an integer that does not fit in int32"):
        next(big)


def test_what_no_device_can_hold():
    sharding = NamedSharding(mesh(8), PartitionSpec("data"))
    with pytest.raises(Misuse, match="dtype object, which no device holds: turn it into numbers"):
        next(Pipeline(Records(16), batch_size=8, seed=1).iterator(sharding=sharding))
    with pytest.raises(Misuse, match="a batch of 9 cannot be sharded"):
        Pipeline(Records(16), batch_size=9, seed=1).iterator(sharding=sharding)
    with pytest.raises(Misuse, match="'carry' or 'drop'"):
        numbers(16, batch_size=8, remainder="keep").iterator(sharding=sharding)
    with pytest.raises(Misuse, match=r"must be a jax\.sharding\.Sharding"):
        columns(16).iterator(sharding=PartitionSpec("data"))


PROCESS = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec
sys.path.insert(0, sys.argv[1])
from memory_source import Records, number
from datapipe import Pipeline
source = Records(40)
pipe = Pipeline(source, batch_size=8, seed=3, epochs=2).map(number, version="1")
mesh = Mesh(np.array(jax.devices()), ("data",))
found = []
with pipe.iterator(sharding=NamedSharding(mesh, PartitionSpec("data")), window=2) as iterator:
    for batch in iterator:
        shards = {s.index[0].indices(8)[0]: s.data.tolist() for s in batch.addressable_shards}
        total = int(jax.jit(lambda x: x.sum())(batch))
        found.append([shards, total])
    state = iterator.get_state()
read = sorted({int(i) for call in source.calls[:1] for i in call})
print(json.dumps([found, state, read]))
jax.distributed.shutdown()
"""


def test_two_processes_each_read_their_rows(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    logs = [tmp_path / f"{index}.err" for index in range(2)]
    with contextlib.ExitStack() as stack:
        children = []
        for index, log in enumerate(logs):
            child = subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(HERE), address, str(index)],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")),
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        answers = []
        for child, log in zip(children, logs, strict=True):
            out, _ = child.communicate(timeout=120)
            assert child.returncode == 0, log.read_text()
            answers.append(json.loads(out.splitlines()[-1]))
    pipe = Pipeline(Records(40), batch_size=8, seed=3, epochs=2).map(number, version="1")
    alone = pipe.iterator()
    wanted = [batch.tolist() for batch in alone]
    (one, state, read), (other, other_state, other_read) = answers
    for batch, (mine, total), (theirs, other_total) in zip(wanted, one, other, strict=True):
        shards = {int(start): rows for start, rows in {**mine, **theirs}.items()}
        assert [n for start in sorted(shards) for n in shards[start]] == batch
        assert len(mine) == len(theirs) == 2
        assert total == other_total == sum(batch)
    assert json.dumps(state) == json.dumps(other_state) == json.dumps(alone.get_state())
    assert sorted(read + other_read) == sorted(wanted[0])  # nobody reads the rows of another
