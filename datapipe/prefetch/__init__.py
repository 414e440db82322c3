"""Batches made before they are asked for: by threads, by worker processes, and onto devices.

`prefetcher` keeps the queue; `worker_pool` has processes (`worker_process` here, `worker` there)
make windows into a `ring` of shared buffers; `device_feed` takes batches to devices; `stats` tells
where the time goes.
"""
