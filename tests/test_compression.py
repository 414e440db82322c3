"""Steps of a tier with compression="zstd": exact, open to others, and damage is found in them."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import crash_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from bucket_runs import found_through_environment, spec_of
from crash_runs import Run, after_death, dies, first_save
from damaged_steps import Step, flip, saved_bits, state_of
from faulty_store import Fault
from jax.sharding import NamedSharding, PartitionSpec
from orbax_steps import mesh_sharding
from s3_server import BUCKET, Proxy, s3_server

import ckpt
from ckpt import commit, deliveries, image, specs
from ckpt.errors import AlreadyExists, Damaged, Misuse
from ckpt.image import Header
from ckpt.reader import Reader
from ckpt.store_kv import KvStore
from ckpt.verification import check_step
from tools import inspection, views
from tools.bench.bits import bits
from tools.bench.readers import by_tensorstore, by_v0, by_v1

SEED = int(os.environ.get("DAMAGE_SEED", time.time_ns() % 1_000_000))
PLAIN = None


def tier(root: Path | str, compression: Any = "zstd") -> ckpt.Shared:
    return ckpt.Shared(root, compression=compression)


def save(root: Path, states: dict[int, Any], compression: Any = "zstd") -> None:
    with ckpt.CheckpointManager(tier(root, compression), arena=root.parent / "arena") as m:
        m.resume()
        for step, state in states.items():
            m.save(step, state)
        m.wait_until_finished(60)


def large_state(tag: int) -> dict[str, Any]:
    """Sharded and replicated arrays, of values that shrink and others that do not."""
    rng = np.random.default_rng(tag)
    numbers = rng.standard_normal((64, 32)).astype(np.float32)
    return {
        "both": jax.device_put(numbers, mesh_sharding(4, "a", "b")),
        "rows": jax.device_put(numbers.astype(jnp.bfloat16), mesh_sharding(4, "a")),
        "columns": jax.device_put(np.arange(2048.0, dtype="f4").reshape(32, 64), columns()),
        "zeros": jnp.zeros((300, 1000)),
        "noise": rng.integers(0, 256, 100_000).astype(np.uint8),
        "int4": rng.integers(-8, 8, (40, 50)).astype(specs.DTYPES["int4"]),
        "small": [jnp.full(64, float(i)) for i in range(40)],
        "none": jnp.zeros((0, 3)),
        "scalar": jnp.float32(tag),
        "key": jax.random.key(tag),
    }


def columns() -> NamedSharding:
    return NamedSharding(mesh_sharding(2).mesh, PartitionSpec(None, "b"))


def image_of(root: Path, step: int) -> tuple[Path, Header]:
    (path,) = (root / f"branch-1/{step}").rglob("*.image")
    data = path.read_bytes()
    return path, image.decode(lambda at, n: data[at : at + n], len(data), path.name)


# -- what is saved is what is restored


def test_a_run(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, {step: large_state(step) for step in (1, 2)})
    assert ckpt.verify(root).intact
    for step in (1, 2):
        wanted = bits(large_state(step))
        assert bits(ckpt.restore(root, step=step).state) == wanted
        like = large_state(step) | {
            "both": jax.device_put(jnp.zeros((64, 32)), mesh_sharding(2, "b", "a")),
            "columns": jax.device_put(jnp.zeros((32, 64)), mesh_sharding(4, "a")),
        }
        found = ckpt.restore(root, like, step=step).state
        assert bits(found) == wanted
        assert found["both"].sharding == like["both"].sharding
        path, header = image_of(root, step)
        assert header.compression == "zstd"
        manifest = json.loads((root / f"branch-1/{step}/manifest.json").read_bytes())
        assert manifest["bytes"] == int(header.columns.nbytes.sum()) > path.stat().st_size


def test_every_dtype_and_odd_shapes(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    state = {
        f"{name}-{number}": rng.integers(0, 2, shape).astype(dtype)
        for name, dtype in specs.DTYPES.items()
        for number, shape in enumerate([(), (5, 3), (0, 2), (1, 1, 700)])
    }
    save(tmp_path / "run", {1: state})
    assert bits(ckpt.restore(tmp_path / "run").state) == bits(state)
    assert image_of(tmp_path / "run", 1)[1].compression == "zstd"
    for name, wanted in state.items():
        found = by_tensorstore(tmp_path / "run/branch-1/1", name)
        assert (found.dtype, found.shape, found.tobytes()) == (
            wanted.dtype,
            wanted.shape,
            wanted.tobytes(),
        )


def test_a_run_whose_tier_changes(tmp_path: Path) -> None:
    root, wanted = tmp_path / "run", {}
    for step, compression in enumerate([None, "zstd", None, "zstd"], 1):
        save(root, {step: large_state(step)}, compression)
        wanted[step] = compression
    for step, compression in wanted.items():
        assert bits(ckpt.restore(root, step=step).state) == bits(large_state(step))
        assert image_of(root, step)[1].compression == compression
    assert ckpt.verify(root).intact
    assert ckpt.open(root).all_steps() == [1, 2, 3, 4]


@pytest.mark.parametrize(("before", "after"), [(PLAIN, "zstd"), ("zstd", PLAIN), ("zstd", "zstd")])
def test_saving_the_newest_step_again(tmp_path: Path, before: Any, after: Any) -> None:
    """Digests are those of the values: it takes no reading to see that they are the same."""
    root = tmp_path / "run"
    save(root, {1: large_state(1)}, before)
    with ckpt.CheckpointManager(tier(root, after), arena=tmp_path / "arena") as m:
        m.resume()
        with mock.patch("ckpt.again.load", side_effect=AssertionError("was read")):
            assert m.save(1, large_state(1)) is not None
        with pytest.raises(AlreadyExists, match="noise: other values"):
            m.save(1, large_state(1) | {"noise": np.zeros(100_000, np.uint8)})


def test_same_values_same_bytes(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        root = tmp_path / name / "run"
        save(root, {1: large_state(5), 2: large_state(6), 3: large_state(5)})
        for step in (1, 3):
            path, header = image_of(root, step)
            data = path.read_bytes()
            end = int(image.payload_ranges(header).sum(axis=1).max())
            found.append((data[4096:end], header.columns.stored.tolist()))
    assert found[1:] == found[:-1]


def test_files_made_anew_are_those_of_the_writer(tmp_path: Path) -> None:
    """Chunks move from step to step: the index is that of this step, all else is used again."""
    root = tmp_path / "run"
    states = {step: large_state(step) for step in (1, 2, 3)}
    states[4] = states[3]
    save(root, states)
    for step in states:
        path, header = image_of(root, step)
        place = path.parent.parent.parent
        for name, data in commit.step_files([header]).items():
            assert (place / name).read_bytes() == data, f"step {step}: {name}"


def test_tiers_that_are_refused() -> None:
    for wrong in ("gzip", "", True, 1):
        with pytest.raises(Misuse, match=r"Shared\(compression=.*\): wanted 'zstd' or None"):
            tier("anywhere", wrong)


# -- the slot


def test_the_slot_is_an_image_all_the_while_and_free_before_the_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot the next snapshot is taken while the step before is still being written."""
    seen: list[bool] = []
    second_is_taken = threading.Event()
    write, compress = commit.write_image, deliveries._compressed

    def watched(header: Header, data: memoryview) -> Any:
        before = bytes(data)
        made = compress(header, data)
        assert bytes(data) == before
        return made

    def held_back(*arguments: Any) -> None:
        seen.append(second_is_taken.wait(60))
        write(*arguments)

    monkeypatch.setattr(deliveries, "_compressed", watched)
    monkeypatch.setattr(commit, "write_image", held_back)
    root = tmp_path / "run"
    with ckpt.CheckpointManager(tier(root), arena=tmp_path / "arena", slots=1) as m:
        m.resume()
        m.save(1, state_of(1))
        m.save(2, state_of(2))
        second_is_taken.set()
        m.wait_until_finished(60)
    assert seen == [True, True]
    for step in (1, 2):
        assert bits(ckpt.restore(root, step=step).state) == saved_bits(step)


def test_a_copy_that_finds_no_memory_fails_the_save_and_not_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    with ckpt.CheckpointManager(tier(root), arena=tmp_path / "arena", slots=1) as m:
        m.resume()
        with mock.patch("ckpt.compressing.mmap") as module:
            module.mmap.side_effect = OSError(12, "planted")
            pending = m.save(1, state_of(1))
            assert pending is not None
            with pytest.raises(ckpt.StoreFailed, match=r"no room for a compressed copy.*planted"):
                pending.wait(timeout=60)
        m.save(2, state_of(2))
    assert ckpt.open(root).all_steps() == [2]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_last_saves_of_a_trainer_that_never_closes(
    tmp_path: Path, compression: str | None
) -> None:
    """They are still in the queue when the interpreter ends, and no thread can be started."""
    program = """
        import sys
        import numpy as np
        import ckpt
        compression = sys.argv[2] or None
        m = ckpt.CheckpointManager(ckpt.Shared(sys.argv[1], compression=compression))
        m.resume()
        state = {str(i): np.full(300_000, float(i)) for i in range(8)}
        for step in (1, 2):
            m.save(step, {**state, "step": np.int64(step)})
    """
    root = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(root), compression or ""],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ckpt.open(root).all_steps() == [1, 2]
    found = ckpt.restore(root).state
    assert found["step"] == 2
    assert all((found[str(i)] == i).all() for i in range(8))


# -- others


def test_tensorstore_and_orbax_open_a_step(tmp_path: Path) -> None:
    state = large_state(4)
    del state["none"]  # of zero size, which has no chunks
    save(tmp_path / "run", {4: state})
    step = tmp_path / "run/branch-1/4"
    for param in ("both", "rows", "columns", "zeros", "noise", "int4", "small.7", "scalar"):
        wanted = np.asarray(state["small"][7] if param == "small.7" else state[param])
        found = by_tensorstore(step, param)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes(), param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of shardings that nobody gave
        for found in (by_v0(step), by_v1(step)):
            assert bits(found) == bits(state)


# -- damage


@pytest.fixture
def step(tmp_path: Path) -> Step:
    save(tmp_path / "run", {2: state_of(2)})
    found = Step(tmp_path / "run", 2)
    found.unharmed("as it was saved")
    return found


def test_a_flipped_bit_in_any_byte_is_found(step: Step) -> None:
    rng = random.Random(SEED)
    path, header = image_of(step.root, 2)
    name, told = str(path.relative_to(step.path)), 0
    padding = step.padding(name)
    chunks = {
        at for start, n in image.payload_ranges(header).tolist() for at in range(start, start + n)
    }
    file = os.open(path, os.O_RDWR)
    try:
        for at in range(header.size_bytes):
            bit = rng.randrange(8)
            if at in padding or (at not in chunks and at % 16):
                continue
            flip(file, at, 1 << bit)
            step.reported(name, f"{name}: bit {bit} of byte {at} flipped (seed {SEED})")
            flip(file, at, 1 << bit)
            told += 1
        for at in padding:
            flip(file, at, 0xFF)
    finally:
        os.close(file)
    assert told > len(chunks) > 200
    step.unharmed("all padding overwritten")


def test_tensorstore_gives_an_error_or_what_was_saved(step: Step) -> None:
    rng = random.Random(SEED)
    path, header = image_of(step.root, 2)
    whole = path.read_bytes()
    refused = 0
    for row, (start, length) in enumerate(image.payload_ranges(header).tolist()):
        param = header.arrays[int(header.columns.array[row])].param
        wanted = by_tensorstore(step.path, param).tobytes()
        for bit in rng.sample(range(8 * length), 8):
            broken = bytearray(whole)
            broken[start + bit // 8] ^= 1 << bit % 8
            path.write_bytes(broken)
            what = f"{param}: bit {bit} of the chunk at {start} (seed {SEED})"
            try:
                found = by_tensorstore(step.path, param).tobytes()
            except ValueError:
                refused += 1
                continue
            assert found == wanted, f"{what}: WRONG VALUES"
    assert refused == 8 * len(header.columns.array), "a CRC-32C sees each single bit"


def test_damage_is_named_by_leaf_and_file(step: Step) -> None:
    path, header = image_of(step.root, 2)
    data = bytearray(path.read_bytes())
    for row, (start, length) in enumerate(image.payload_ranges(header).tolist()):
        if header.arrays[int(header.columns.array[row])].param == "params.w":
            data[start + length // 2] ^= 1
    path.write_bytes(data)
    name = f"branch-1/2/state/d/{path.name}"
    where = rf"leaf params/w: .*{name}: params.w, chunk \(0, 0\) at byte \d+: wanted CRC-32C"
    with pytest.raises(Damaged, match=where):
        ckpt.restore(step.path)
    with pytest.raises(Damaged, match=r"leaf params/w: chunk .* wanted CRC-32C"):
        check_step(step.store, step.id)


# -- crashes


def test_death_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes next has a tier without compression, and finishes the step all the same."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    shared = functools.partial(ckpt.Shared, compression="zstd")

    def act(run: Run, faults: Sequence[Fault]) -> Any:
        with mock.patch.object(crash_runs, "Shared", shared):
            return dies(run, first_save, faults)

    operations = act(Run(tmp_path / "whole").begin(), []).operations
    rolled_forward = 0
    for at in range(1, len(operations) + 1):
        for kind in ("stop", "torn"):
            run = Run(tmp_path / f"{kind}-{at}").begin()
            store = act(run, [Fault(at, kind)])  # type: ignore[arg-type]
            assert store.operations == operations[:at]
            restored = after_death(
                run, f"{kind} at {at} of {len(operations)}: {operations[at - 1]}"
            )
            if restored.step == 1:
                assert image_of(run.root, 1)[1].compression == "zstd"
                assert image_of(run.root, 2)[1].compression is None
                rolled_forward += run.acked == 0
            shutil.rmtree(run.base)
    assert rolled_forward > 3


# -- buckets


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield found_through_environment(proxy, monkeypatch)


def test_a_step_in_a_bucket(bucket: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvStore, "cut_bytes", 50_000)
    root, state = f"s3://{BUCKET}/packed", large_state(1)
    with ckpt.CheckpointManager(tier(root), arena=tmp_path / "arena") as m:
        m.resume()
        m.save(1, state)
    assert bits(ckpt.restore(root, state).state) == bits(state)
    assert ckpt.verify(root).intact
    reader = Reader(root)
    step = reader.find(1)
    names = reader.store.requests.names("branch-1/1/state/d/")  # type: ignore[attr-defined]
    assert len([name for name in names if ".bytes-" in name]) > 2, names
    assert step.step == 1
    base = spec_of(bucket, "packed/branch-1/1/state/")
    for param in ("both", "noise", "zeros", "scalar"):
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{param}/"}
        opened = ts.open({"driver": "zarr3", "kvstore": kvstore}, context=ts.Context()).result()
        np.testing.assert_array_equal(opened.read().result(), np.asarray(state[param]))


# -- tools


def test_inspect_tells_both_sizes(tmp_path: Path) -> None:
    for name, compression in (("plain", None), ("packed", "zstd")):
        save(tmp_path / name, {1: {"w": jnp.zeros((512, 512))}}, compression)
        found = inspection.inspect(str(tmp_path / name))
        assert (found.compression, found.payload_bytes) == (compression, 1 << 20)
        text = "\n".join(str(each) for each in views.inspect(found))
        assert ("compressed (zstd) from 1 MiB" in text) == (compression is not None), text
        assert found.size_bytes < 100_000 or compression is None


def test_nobody_pays_for_it_who_does_not_use_it() -> None:
    """No module of ours loads zstandard before there is a frame; JAX, for one, may have it."""
    code = "import sys, ckpt.image, ckpt.fetch, ckpt.writer; print('zstandard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
