"""From positions to batches: records are read, go through the functions, and are put together.

`window` reads the rows of several batches at once (`reading`), `batch` makes each (`transforms`,
`returned`, `stack`). Bad records are told (`faults`) or others stand in (`replacing`,
`substitutes`); `cost` says what making it took.
"""
