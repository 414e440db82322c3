"""Which record comes when: pure arithmetic, no file is touched.

From below: bijections of one epoch (`permute`, `grain_order`, `block_shuffle`), one source through
its epochs (`streams`), several sources in one sequence (`mixture`, `examples`, `rows`), what is
left out of it (`skips`, `addresses`, `lasting_skips`, `ranks`), and how it is cut into batches
(`epoch_bounds`, `plan`).
"""
