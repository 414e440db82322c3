"""What stands before the shuffle: filters and packing as sources over sources.

Indexes say which records stay and how long documents are (`indexes`, in a `sidecar` that tells its
`origin`; made from columns by `scanning`, by a function by `index_building`). `packing` and
`concatenation` lay `documents` into rows, which `pieces` describe (`fitting`: which bin each goes
into); rows that follow the shuffle are others in each epoch (`epoch_sources`). `views` are the
sources that come of it, `stages` the arguments of `Pipeline` that ask for them. `grain_source`
takes in Grain's datasets, known by a `tree_digest`.
"""
