"""What the numbers of a run may depend on beside its state and data."""

from __future__ import annotations

import functools
import os
import platform
from importlib import metadata
from typing import Any


@functools.cache
def environment() -> dict[str, Any]:
    """Versions, platform, devices, flags and numeric settings, as a JSON value."""
    import jax

    config: Any = jax.config
    return {
        "lastgood": metadata.version("lastgood"),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "device_kind": jax.local_devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": config.jax_default_matmul_precision,
        "prng_impl": str(config.jax_default_prng_impl),
        "threefry_partitionable": bool(config.jax_threefry_partitionable),
        "x64": bool(config.jax_enable_x64),
    }
