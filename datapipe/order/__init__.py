"""Which record comes when: pure arithmetic, no file is touched.

From below: bijections of one epoch (`permute`, `grain_order`, `block_shuffle`), one source through
its epochs (`streams`), several in one sequence (`mixture`, `examples`, told as `rows`), what is
left out of it (`skips`, `lasting_skips`, `ranks`), and its cutting into batches (`epoch_bounds`,
`plan`).
"""
