"""Which nodes see the same directory: each leaves a file with a unique name there, and looks for those of the others."""

from __future__ import annotations

import os
from collections.abc import Collection

from ridethrough.format import layout
from ridethrough.seam.fs import FileSystem
from ridethrough.store.commit import ensure_dir, publish


def leave_probe(fs: FileSystem, run_dir: str, token: str, node: str) -> None:
    """A file of this node is in the directory, for everybody who sees it."""
    publish(fs, os.path.join(run_dir, layout.probe_name(token, node)), node.encode())


def see_probes(fs: FileSystem, run_dir: str, token: str, nodes: Collection[str]) -> frozenset[str]:
    """Those of the nodes whose probe is seen from here; the directory exists afterwards."""
    # A network file system remembers for up to a minute that a directory was not there; making it asks the server.
    ensure_dir(fs, run_dir)
    # By name and not by a listing, which may be as old; nobody has looked for these names before.
    return frozenset(node for node in nodes if _is_there(fs, os.path.join(run_dir, layout.probe_name(token, node))))


def _is_there(fs: FileSystem, path: str) -> bool:
    try:
        fs.stat(path)
    except FileNotFoundError:
        return False
    return True


def remove_probe(fs: FileSystem, run_dir: str, token: str, node: str) -> None:
    """This node's probe is gone; one that a cut leaves behind is looked for by nobody again."""
    fs.remove(os.path.join(run_dir, layout.probe_name(token, node)))
