"""One of several processes of a run: plays scenes and writes down what it saw.

Run as `process_child.py <index> <count> <port> <directory> <scene> ...`. Each scene has its own
run under the directory; what it returns goes to `<directory>/<scene>.<index>.json`. A scene of no
known name goes on with the run that lies there. With one process there is no coordination service.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

import jax
import process_bad_records
import process_grain
import process_kills
import process_loops
import process_scenes
import process_troubles
import process_writers
from process_stage import Stage

SCENES = {
    **process_scenes.SCENES,
    **process_troubles.SCENES,
    **process_kills.SCENES,
    **process_loops.SCENES,
    **process_bad_records.SCENES,
    **process_grain.SCENES,
    **process_writers.SCENES,
}


def main() -> None:
    index, count, port = (int(word) for word in sys.argv[1:4])
    directory = Path(sys.argv[4])
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            count,
            index,
            initialization_timeout=15 if sys.argv[5] == "killed_at_random" else 60,
            shutdown_timeout_seconds=60,
        )
    for scene in sys.argv[5:]:
        stage = Stage(scene.partition("=")[0], directory, index, count)
        stage.meet()
        begun = time.monotonic()
        try:
            found = SCENES.get(scene, process_scenes.resume)(stage)
        except Exception:
            found = {"raised": traceback.format_exc()}
        found["took"] = time.monotonic() - begun
        (directory / f"{scene}.{index}.json").write_text(json.dumps(found))
    if sys.argv[5].startswith("killed"):
        os._exit(0)  # a peer is dead: jax.distributed would wait for its farewell, and abort
    if count > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
