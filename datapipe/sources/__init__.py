"""What comes before the shuffle: filters and packing, as sources over sources.

Indexes say which records are kept and how long documents are (`indexes`): from columns
(`scanning`), from a function (`index_building`), or from a file (`sidecar`, `origin`). `packing`
(with `fitting`) and `concatenation` put `documents` into rows, which `pieces` describe; rows made
after the shuffle differ from epoch to epoch (`epoch_sources`). `views` are the sources that result,
`stages` the arguments of `Pipeline` that ask for them. `grain_source` makes sources of Grain's
datasets (`tree_digest` tells them apart).
"""
