"""Snapshots in memory that outlive the trainer, and the one process that writes them to disk.

Words: a *board* is a small shared page that one process writes and others read; a *slot* holds
one snapshot of one rank; the *keeper* owns the memory of both and hands out descriptors
(`link`). A trainer posts into its slots (`slots.SlotWriter`); the *persister* (`persist`) pins
posted slots, commits their parts through the store and answers on its own board.
"""
