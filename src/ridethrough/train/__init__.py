"""Inside the training process: capture, snapshot, restore, and the data position.

`checkpointer` is what a script uses. The start agreement is `agreement`, on top of `tier` (which
run, and who sees what), `loading` (every rank gets its parts) and `nodes` (addresses, key); `group`
is the only place with collectives. `state` turns objects into tensors and trees and back, `data`
makes a DataLoader resumable, `deal` gives what is left of an epoch to any number of ranks, `rng`
holds the random generators, `provenance` says what made the run, `guard` compares it with what would
resume it, and `export` writes state dicts for other tools.
"""
