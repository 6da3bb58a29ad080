"""Inside the training process: capture, snapshot, restore, and the data position.

`checkpointer` is what a script uses. `agreement` is the only place with collectives. `state`
turns objects into tensors and trees and back, `data` makes a DataLoader resumable, `rng` holds
the random generators, `provenance` says what made the run.
"""
