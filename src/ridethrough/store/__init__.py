"""Checkpoints on a tier: commit them, find the newest restorable, prove, quarantine and retain them.

Words: a *part* is committed by its *seal*; a *checkpoint* exists when every part of its
attempt's roster has a valid seal with its save id. Nothing else decides: no pointer, no mtime,
no number.

Committing one part (`commit.commit_part`), each step durable before the next:

1. payload to a unique new name, space reserved first, written, fsynced, directory fsynced;
2. seal to a temporary name, fsynced;
3. seal renamed to its name, directory fsynced.

Deleting (`retain.delete_checkpoint`) goes the other way round: manifest, seals, payloads, with
the directory fsynced between, so that a cut never leaves a seal without its payload.
"""
