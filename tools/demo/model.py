"""A small byte-level transformer in plain JAX, with AdamW from Optax and dropout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

VOCABULARY = 256
CONTEXT = 64  # bytes a prediction may look back
WIDTH = 128
HEADS = 4
LAYERS = 2
DROPOUT = 0.1

State = dict[str, Any]  # "params", "opt", "key"

_optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_constant_schedule(1e-4, 3e-3, 20), weight_decay=0.01),
)


def start(seed: int) -> State:
    """Parameters (float32), optimizer state and the dropout key before the first update."""
    return _start(jax.random.key(seed))


@jax.jit
def _start(key: jax.Array) -> State:
    key, *keys = jax.random.split(key, 3 + 4 * LAYERS)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(keys.pop(), (rows, columns), jnp.float32) * scale / rows**0.5

    params = {
        "embed": matrix(VOCABULARY, WIDTH, VOCABULARY**0.5 * 0.1),
        "position": matrix(CONTEXT, WIDTH, CONTEXT**0.5 * 0.1),
        "layers": [
            {
                "attend": {"qkv": matrix(WIDTH, 3 * WIDTH), "out": matrix(WIDTH, WIDTH, 0.5)},
                "feed": {"up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH, 0.5)},
                "scales": jnp.ones((2, WIDTH), jnp.float32),
            }
            for _ in range(LAYERS)
        ],
        "scale": jnp.ones(WIDTH, jnp.float32),
    }
    return {"params": params, "opt": _optimizer.init(params), "key": key}


@jax.jit(donate_argnums=0)
def train_step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    """One update from a batch uint8[rows, CONTEXT + 1]; returns the loss before it, in nats."""
    key, dropout = jax.random.split(state["key"])
    loss, gradient = jax.value_and_grad(_loss)(state["params"], batch.astype(jnp.int32), dropout)
    updates, opt = _optimizer.update(gradient, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, loss


def _loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
    x = params["embed"][tokens[:, :-1]] + params["position"]
    keys = jax.random.split(key, 2 * LAYERS)
    for number, layer in enumerate(params["layers"]):
        attended = _attend(layer["attend"], _normal(x, layer["scales"][0]))
        x = x + _dropout(attended, keys[2 * number])
        hidden = jax.nn.gelu(_normal(x, layer["scales"][1]) @ layer["feed"]["up"])
        x = x + _dropout(hidden @ layer["feed"]["down"], keys[2 * number + 1])
    logits = _normal(x, params["scale"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _attend(layer: Any, x: jax.Array) -> jax.Array:
    rows, length, _ = x.shape
    query, key, value = (
        part.reshape(rows, length, HEADS, WIDTH // HEADS)
        for part in jnp.split(x @ layer["qkv"], 3, axis=-1)
    )
    out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return out.reshape(rows, length, WIDTH) @ layer["out"]


def _normal(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _dropout(x: jax.Array, key: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - DROPOUT, x.shape)
    return jnp.where(kept, x / jnp.float32(1 - DROPOUT), 0.0)
