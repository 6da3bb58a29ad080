"""What outlives the trainers on a node.

Words: the *keeper* is the process behind `ridethrough run`: it holds the memory of all snapshots
and starts the other two and the user's command, and does no I/O of its own that could block. The
*supervisor* observes, decides (`policy`, pure) and acts. A *launch* is one start of the command.

One round of the supervisor (`loop`): observe the boards, the command and the signals; decide;
put the decision in the journal; act on it through the keeper.
"""
