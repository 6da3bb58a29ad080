"""Drills: a small distributed job, its power really cut, and what that costs measured.

Words: a *virtual node* is a network namespace, an ext4 file system on a loop device and the
processes in it; a *cut* takes all three at one instant. The *trainee* is the job that is cut; its
*trace* (a line a step and rank, with a digest of each class of state) is kept outside the node.

One drill (`conduct`): train once without a cut and keep the trace; train again on a new node, cut
as the scenario says, give the power back, give the same command again; compare every line
(`compare`), measure RTO and RPO (`measure`), check that nothing acknowledged was lost.
"""
