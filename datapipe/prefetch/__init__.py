"""Batches made before they are asked for: by threads, by worker processes, and onto devices.

`prefetcher` keeps the queue, `makers` are its threads; `worker_pool` has processes
(`worker_process` here, `worker` there) make windows into a `ring` of shared buffers, and errors
come back as they are (`exceptions`); `device_feed` takes batches to devices; `pace` says how far
ahead to work, `stats` where the time goes, and `lifetime` when an iterator may be used.
"""
