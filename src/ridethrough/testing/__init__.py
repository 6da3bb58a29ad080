"""Public fakes and faults, so that your recovery can be tested the way ours is.

* `FakeClock`: time that moves when told to.
* `FakeNetwork` and its `Weather`: packets that are lost, delayed, repeated and mangled, from one seed.
* `RecordingFileSystem` and the faults over it (`ErrorOn`, `FlipBit`, `TruncateOnce`, `ShortRead`,
  `DropSyncs`, `DropDirSyncs`): real storage with one named fault.
* `CrashFS`: storage in memory that enumerates what a power cut at any call may leave; `Timeline` for several disks.
* `LoopDisk`: a small ext4 or XFS disk whose power can be cut (root).
* `SimpleStore`, `save_once`, `load_newest`: checkpoints with known bytes, without a trainer.

May import everything; nothing imports it.
"""

from ridethrough.testing.clock import FakeClock
from ridethrough.testing.crash import CrashFS
from ridethrough.testing.crash_cuts import State, Timeline
from ridethrough.testing.disk import CUT, CUT_JOURNAL_FLUSHED, LoopDisk, missing_for_disks
from ridethrough.testing.faults import DropDirSyncs, DropSyncs, ErrorOn, FlipBit, RecordingFileSystem, ShortRead, TruncateOnce, flip_bit
from ridethrough.testing.network import FakeNetwork, Weather
from ridethrough.testing.store import Loaded, Saved, SimpleStore, load_newest, restorable_steps, save_once

__all__ = [
    "CUT",
    "CUT_JOURNAL_FLUSHED",
    "CrashFS",
    "DropDirSyncs",
    "DropSyncs",
    "ErrorOn",
    "FakeClock",
    "FakeNetwork",
    "FlipBit",
    "Loaded",
    "LoopDisk",
    "RecordingFileSystem",
    "Saved",
    "ShortRead",
    "SimpleStore",
    "State",
    "Timeline",
    "TruncateOnce",
    "Weather",
    "flip_bit",
    "load_newest",
    "missing_for_disks",
    "restorable_steps",
    "save_once",
]
