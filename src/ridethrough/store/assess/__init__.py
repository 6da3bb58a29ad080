"""What a place for checkpoints is worth: measured first, then judged.

Words: a *place* is where checkpoints are to go; a *finding* is what a measurement came to; a *fact* is a finding said for
people, with its state (measured, configured, unknown) and how it was found; a *remark* is what a person should know
before relying on the place.

1. `measure` runs one phase after the other in a directory of its own below the place, each in child processes that can
   be given up, and comes to `Findings`.
2. `see` asks other nodes what they see of it.
3. `judge` (pure) makes facts, save times, remarks and a verdict of the findings.

Another kind of place needs a `measure` of its own that comes to the same `Findings`, with None for what does not exist
there.
"""
