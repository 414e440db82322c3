"""Many arrays placed at once: the private call gives what `device_put` gives, or is not used."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt import collector, placement
from ckpt.fetch import aligned_empty

DTYPES = [
    np.bool_,
    np.int8,
    np.uint8,
    np.int16,
    np.int32,
    np.uint32,
    np.float16,
    np.float32,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.int4,
]
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 3), (130, 7)]


def shardings() -> list[jax.sharding.Sharding | None]:
    mesh = jax.make_mesh((8,), ("x",))
    first, last = jax.devices()[0], jax.devices()[-1]
    found: list[Any] = [None, SingleDeviceSharding(first), SingleDeviceSharding(last)]
    found += [NamedSharding(mesh, PartitionSpec())]
    found += [
        SingleDeviceSharding(first, memory_kind=kind.kind) for kind in first.addressable_memories()
    ]
    return found


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    placement._fast_put.cache_clear()
    yield
    placement._fast_put.cache_clear()


@pytest.mark.parametrize("aligned", [True, False])
def test_all_dtypes_shapes_and_shardings_as_device_put_has_them(*, aligned: bool) -> None:
    assert placement._fast_put() is not None, "this jax has no such call: the slow way is taken"
    buffers, wanted = [], []
    for dtype in DTYPES:
        for shape in SHAPES:
            for sharding in shardings():
                buffer = aligned_empty(shape, np.dtype(dtype), 64)
                if not aligned:
                    room = np.empty(buffer.nbytes + 1, np.uint8)
                    buffer = room[1:].view(dtype).reshape(shape)
                buffer[...] = np.arange(buffer.size).reshape(shape).astype(dtype)
                buffers.append(buffer)
                wanted.append(sharding)
    found = placement.put(buffers, wanted)
    for one, buffer, sharding in zip(found, buffers, wanted, strict=True):
        other = jax.device_put(buffer, sharding)
        assert type(one) is type(other)
        for trait in (*placement._TRAITS, "devices", "is_fully_replicated"):
            a, b = getattr(one, trait), getattr(other, trait)
            assert (a() if callable(a) else a) == (b() if callable(b) else b), (trait, sharding)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes() == buffer.tobytes()
        assert not sharding or one.sharding.memory_kind == sharding.memory_kind


def test_arrays_from_the_private_call_can_be_donated_and_deleted() -> None:
    sharding = SingleDeviceSharding(jax.devices()[0])
    buffer = aligned_empty((1000,), np.dtype(np.float32), 64)
    buffer[...] = 1
    (array,) = placement.put([buffer], [sharding])
    assert (jax.jit(lambda x: x + 1, donate_argnums=0)(array) == 2).all()
    assert (buffer == 1).all()
    (other,) = placement.put([buffer], [sharding])
    other.delete()
    assert other.is_deleted()


def test_a_jax_without_the_call_or_with_another_takes_the_public_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jax._src.lib import xla_client

    buffer = np.arange(4, dtype=np.int32)
    wanted = SingleDeviceSharding(jax.devices()[1])
    right = xla_client.batched_device_put

    def missing(*_: Any, **__: Any) -> Any:
        raise TypeError("no such argument")

    def wrong_values(aval: Any, sharding: Any, xs: Any, *rest: Any, **more: Any) -> Any:
        return right(aval, sharding, [x + 1 for x in xs], *rest, **more)

    def wrong_commitment(
        aval: Any, sharding: Any, xs: Any, devices: Any, _: Any, **more: Any
    ) -> Any:
        return right(aval, sharding, xs, devices, False, **more)

    for other in (missing, wrong_values, wrong_commitment):
        monkeypatch.setattr(xla_client, "batched_device_put", other)
        placement._fast_put.cache_clear()
        assert placement._fast_put() is None
        monkeypatch.setattr(xla_client, "batched_device_put", right)  # device_put itself calls it
        (array,) = placement.put([buffer], [wanted])
        assert array.sharding == wanted
        assert (array == jnp.arange(4)).all()


def test_the_collector_waits_and_goes_on_as_before() -> None:
    assert gc.isenabled()
    with collector.waiting():
        assert not gc.isenabled()
        with collector.waiting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector.waiting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError), collector.waiting():
        _ = 1 / 0
    assert gc.isenabled()
