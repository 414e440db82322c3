"""Meshes of all devices."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), tuple("abc"[: len(shape)]))
