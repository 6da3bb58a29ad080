"""Drills: a small distributed job, its power and links really cut, and what that costs measured.

Words: a *virtual node* is a set of namespaces, an ext4 file system on a loop device and the processes in
them (`machine`); nodes on one switch, perhaps with a file server, are a *cluster*; the *site* of a drill is
a cluster or, without root, one node of which only processes can be killed. A *cut* takes nodes at one
instant: links first, so that their peers see silence. The *trainee* is the job that is cut; its *trace* (a
line a step and rank, with a digest of each class of state) is kept outside the nodes.

One drill (`conduct`): train once without a cut and keep the trace; train again on new nodes with the faults
of a *scenario* (`play`), where a node that has its power back is given the same command again; compare every
line (`compare`), measure RTO and RPO (`measure`), check that nothing acknowledged was lost.
"""
