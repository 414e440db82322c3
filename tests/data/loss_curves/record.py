"""Records the curves in this directory: small real training runs, some of them disturbed.

Run by hand: `python tests/data/loss_curves/record.py [NAME ...]`. README.md says what is in the
files. On another machine, or with other versions of JAX, the numbers come out a little different;
the onsets do not, since they are the first step that was disturbed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

HERE = Path(__file__).parent
LETTERS = 48
LENGTH = 24


# --- data -----------------------------------------------------------------------------------------


class Text:
    """Words of a made-up language, drawn by Zipf's law; each source has a language of its own."""

    def __init__(self, seed: int, source: int = 0) -> None:
        self._rng = np.random.default_rng([seed, source])
        words = np.random.default_rng(100 + source)
        self._words = [words.integers(1, LETTERS, words.integers(2, 7)) for _ in range(300)]
        weights = 1 / np.arange(1, 301)
        self._weights = weights / weights.sum()

    def batch(self, rows: int) -> np.ndarray:
        picked = self._rng.choice(300, (rows, LENGTH), p=self._weights)
        lines = [np.concatenate([[0, *self._words[n]] for n in row]) for row in picked]
        return np.array([line[: LENGTH + 1] for line in lines], np.int32)


class Copies:
    """The second half repeats the first: a plateau, until the model has found that out."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def batch(self, rows: int) -> np.ndarray:
        half = self._rng.integers(0, 16, (rows, LENGTH // 2), np.int32)
        return np.concatenate([half, half, half[:, :1]], 1)


# --- models ---------------------------------------------------------------------------------------

WIDTH = 32
HEADS = 4


def transformer(seed: int, layers: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    return {
        "in": matrix(LETTERS, WIDTH),
        "at": 0.1 * matrix(LENGTH, WIDTH),
        "layers": [
            {
                "qkv": matrix(WIDTH, 3 * WIDTH),
                "mix": matrix(WIDTH, WIDTH),
                "up": matrix(WIDTH, 4 * WIDTH),
                "down": matrix(4 * WIDTH, WIDTH),
            }
            for _ in range(layers)
        ],
        "out": matrix(WIDTH, LETTERS),
    }


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def logits_of(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    x = params["in"][ids] * WIDTH**0.5 + params["at"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in params["layers"]:
        parts = (normed(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["mix"]
        x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
    return normed(x) @ params["out"]


def loss_of(params: dict[str, Any], rows: jax.Array) -> jax.Array:
    logits = logits_of(params, rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def half_loss_of(params: dict[str, Any], rows: jax.Array) -> jax.Array:
    """As with float16 and a loss scale that is never lowered: above 65504 it overflows."""
    loss = loss_of(params, rows)
    scaled = (loss * 2.0**13).astype(jnp.float16)
    return scaled.astype(jnp.float32) / 2.0**13


# --- runs -----------------------------------------------------------------------------------------

Batch = Callable[[int], np.ndarray]
Edit = Callable[[dict[str, Any], Any], tuple[dict[str, Any], Any]]


@dataclass(frozen=True)
class Recipe:
    about: str
    optimizer: optax.GradientTransformation
    batch: Batch
    onset: int | None = None
    steps: int = 700
    seed: int = 0
    layers: int = 1
    loss: Callable[[dict[str, Any], jax.Array], jax.Array] = loss_of
    edit: Edit | None = None
    """Changes weights or optimizer before update `edited`."""
    edited: int = 0


def record(recipe: Recipe) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each update."""
    params = transformer(recipe.seed, recipe.layers)
    state = recipe.optimizer.init(params)

    @jax.jit
    def update(params: Any, state: Any, rows: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(recipe.loss)(params, rows)
        changes, state = recipe.optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss, optax.global_norm(grads)

    seen = []
    for step in range(1, recipe.steps + 1):
        if recipe.edit is not None and step == recipe.edited:
            params, state = recipe.edit(params, state)
        params, state, loss, norm = update(params, state, recipe.batch(step))
        seen.append((float(loss), float(norm)))
    return seen


def cosine(peak: float, steps: int = 700, warm_up: int = 50) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0, peak, warm_up, steps, peak / 20)


def raised(schedule: optax.Schedule, onset: int, length: int, factor: float) -> optax.Schedule:
    """The learning rate is too high for a while; the loss of the update after the first is bad."""

    def rate(count: Any) -> Any:
        here = (count >= onset - 2) & (count < onset - 2 + length)
        return schedule(count) * jnp.where(here, factor, 1.0)

    return rate


def text(seed: int, rows: int = 8) -> Batch:
    source = Text(seed)
    return lambda step: source.batch(rows)


def copies(seed: int) -> Batch:
    source = Copies(seed)
    return lambda step: source.batch(32)


def turns(seed: int) -> Batch:
    sources = [Text(seed, source) for source in range(2)]
    return lambda step: sources[step // 9 % 2].batch(8)


def growing(seed: int) -> Batch:
    source = Text(seed)
    return lambda step: source.batch(4 if step <= 250 else 16)


def spoilt(batch: Batch, first: int, count: int, spoil: Callable[..., np.ndarray]) -> Batch:
    def made(step: int) -> np.ndarray:
        rows = batch(step)
        return spoil(rows, np.random.default_rng(step)) if 0 <= step - first < count else rows

    return made


def noise(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, LETTERS, rows.shape, np.int32)


def inverted(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return LETTERS - 1 - rows


def half_noise(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(rows.shape) < 0.5, noise(rows, rng), rows).astype(np.int32)


def lone(batch: Batch, every: int) -> Batch:
    return lambda step: (
        noise(batch(step), np.random.default_rng(step)) if step % every == 0 else (batch(step))
    )


def bit_flip(params: dict[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
    weights = np.array(params["layers"][0]["down"])
    weights.view(np.uint32)[5, 7] ^= 1 << 30  # the top bit of the exponent
    weights[5, 7] = np.clip(weights[5, 7], -300, 300)
    params["layers"][0]["down"] = jnp.asarray(weights)
    return params, state


def scaled(params: dict[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
    """As when weights are put into a model with another convention."""
    return {**params, "out": params["out"] * 8}, state


def moments_lost(params: dict[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
    """A restart with the weights and the count, but without the moments of Adam."""

    def lost(path: Any, leaf: Any) -> Any:
        names = [getattr(key, "name", "") for key in path]
        return leaf * 0 if {"mu", "nu"} & set(names) else leaf

    return params, jax.tree_util.tree_map_with_path(lost, state)


def adam(rate: Any) -> optax.GradientTransformation:
    return optax.adam(rate, b2=0.99)


RESTARTS = optax.sgdr_schedule(
    [
        {
            "init_value": 2e-4,
            "peak_value": 5e-3,
            "decay_steps": 175,
            "warmup_steps": 10,
            "end_value": 2e-4,
        }
    ]
    * 4
)

RECIPES = {
    # quiet
    "adam": Recipe("Adam, constant rate", adam(3e-3), text(1)),
    "adamw_cosine": Recipe("AdamW, warm-up and cosine", optax.adamw(cosine(5e-3)), text(2), seed=2),
    "sgd_small_batches": Recipe(
        "momentum, one row a batch", optax.sgd(0.03, 0.9), text(3, rows=1), seed=3
    ),
    "lion": Recipe("Lion, one row a batch", optax.lion(6e-4), text(4, rows=1), seed=4),
    "plateau_and_drop": Recipe(
        "copying task: a plateau, then the loss drops at once",
        adam(2e-3),
        copies(5),
        seed=5,
        layers=2,
        steps=900,
    ),
    "warm_restarts": Recipe("the rate restarts every 175 updates", adam(RESTARTS), text(6), seed=6),
    "sources_in_turn": Recipe("two sources, nine batches each", adam(3e-3), turns(7), seed=7),
    "batch_grows": Recipe("4 rows a batch, 16 from 251 on", adam(3e-3), growing(8), seed=8),
    "lone_bad_batches": Recipe("every 97th batch is noise", adam(2e-3), lone(text(9), 97), seed=9),
    "rate_at_the_edge": Recipe(
        "AdamW with a rate at which the loss wanders", optax.adamw(1.5e-2), text(10), seed=10
    ),
    "moments_lost": Recipe(
        "Adam goes on without its moments at step 390: a rise that passes",
        optax.adam(1e-2, b2=0.9999),
        text(18),
        seed=18,
        edit=moments_lost,
        edited=390,
    ),
    # real spikes
    "by_itself": Recipe(
        "copying task, constant rate: nothing was disturbed; the loss blows up after the drop",
        adam(4e-3),
        copies(5),
        779,
        seed=5,
        layers=2,
        steps=900,
    ),
    "rate_too_high": Recipe(
        "rate x 150 for 6 updates",
        adam(raised(cosine(3e-3), 402, 6, 150)),
        text(11),
        402,
        seed=11,
    ),
    "rate_too_high_sgd": Recipe(
        "momentum, rate x 40 for 10 updates",
        optax.sgd(raised(optax.constant_schedule(0.05), 342, 10, 40), 0.9),
        text(12),
        342,
        seed=12,
    ),
    "noise_batches": Recipe(
        "12 batches of noise", adam(3e-3), spoilt(text(13), 380, 12, noise), 380, seed=13
    ),
    "inverted_batches": Recipe(
        "8 batches of inverted text, one row a batch",
        adam(2e-3),
        spoilt(text(14, rows=2), 460, 8, inverted),
        460,
        seed=14,
    ),
    "label_noise": Recipe(
        "half of the letters are noise in 25 batches",
        optax.adamw(cosine(4e-3)),
        spoilt(text(15), 300, 25, half_noise),
        300,
        seed=15,
    ),
    "bit_flip": Recipe(
        "a weight gets another exponent",
        adam(2e-3),
        text(16),
        420,
        seed=16,
        edit=bit_flip,
        edited=420,
    ),
    "weights_scaled": Recipe(
        "output weights x 8", adam(2e-3), text(17), 350, seed=17, edit=scaled, edited=350
    ),
    "half_overflow": Recipe(
        "float16 loss scale: overflow after the rate was x 1000",
        adam(raised(optax.constant_schedule(3e-3), 332, 4, 1000)),
        text(19),
        332,
        seed=19,
        loss=half_loss_of,
    ),
    "diverges_slowly": Recipe(
        "the rate is multiplied by 1.06 with each update from 300 on",
        optax.sgd(lambda count: 0.1 * 1.06 ** jnp.clip(count - 298, 0, 150.0), 0.9),
        text(20),
        300,
        steps=600,
        seed=20,
    ),
}


def shown(value: float) -> str:
    return f"{value:.4g}"


def main(names: list[str]) -> None:
    for name in names or RECIPES:
        recipe = RECIPES[name]
        rows = record(recipe)
        head = [f"# {recipe.about}", f"# onset: {recipe.onset or 'none'}", "loss,gradient_norm"]
        lines = [f"{shown(loss)},{shown(norm)}" for loss, norm in rows]
        (HERE / f"{name}.csv").write_text("\n".join([*head, *lines]) + "\n")
        print(name, "done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
