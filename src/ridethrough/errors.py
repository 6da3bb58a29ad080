"""Every error this project raises, in one tree.

::

    RideThroughError                      exit
    ├── UsageError                 RT-002    2   the call or its arguments are wrong
    ├── PlatformUnsupported        RT-003    2   not Linux: reading works, running and saving do not
    ├── StoreMissing               RT-010   10   no run directory, or no checkpoint in it
    ├── StoreLocked                RT-011   11   another keeper owns this run on this node
    ├── NothingRestorable          RT-012   12   checkpoints exist, none can be restored
    ├── StorageError
    │   ├── StorageUnreachable     RT-013   13   the bytes cannot be read or written now
    │   │   └── TierMissing        RT-015   13   the run was here before and its marker is gone
    │   ├── StorageDenied          RT-016   13   permission
    │   ├── StoreFull              RT-014   14   no space or no quota
    │   └── StoreReadOnly          RT-017   14   mounted read-only
    ├── Damaged                    RT-040    1   the bytes were read and are wrong
    ├── FormatTooNew               RT-041    2   written by a newer version
    ├── ForeignRecord              RT-042    1   a record of another run, attempt or step
    ├── TwoHeads                   RT-043   21   two attempts claim the same sequence number
    ├── StateNotExpressible        RT-050   22   a value that has no place in a pickle-free tree
    ├── StateMismatch              RT-051   22   the checkpoint does not fit the objects tracked
    ├── StepOrder                  RT-052   22   ckpt.step() called where no optimizer stepped
    ├── MemoryTooSmall             RT-053   21   the snapshot slots do not fit in memory
    ├── ResumeRefused              RT-055   21   something else made the checkpoint, and [resume] says refuse
    ├── SaveFailed                 RT-054   14   a save that was waited for did not become durable
    ├── KeeperGone                 RT-060   70   the process that holds the slots went away
    ├── Fenced                     RT-061   21   a newer attempt owns the run
    ├── JobFailed                  RT-080   22   the user's own code failed: do not retry
    ├── JobStuck                   RT-081   21   the same failure again without progress
    ├── DrillFailed                RT-090    1   a drill target or invariant was missed
    └── Internal                   RT-070   70   a bug in ridethrough

The class docstring is the message template, filled with the keyword fields.
"""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar

_SHOWN_CHARS = 120
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 40
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4


def shown(value: Any) -> str:
    """The value for a message, in a few words, whatever was read from a damaged file or a stranger."""
    text = _SHORT.repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class RideThroughError(Exception):
    """{detail}"""

    code: ClassVar[str] = "RT-000"
    exit_code: ClassVar[int] = 70
    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "ridethrough status"

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        super().__init__(self._fill(type(self).__doc__))

    def _fill(self, template: str | None) -> str:
        # `python -OO` strips docstrings; the class name and the fields still tell what happened.
        if template is None:
            listed = ", ".join(f"{name}={value}" for name, value in self.fields.items())
            return f"{type(self).__name__}: {listed}"
        try:
            return template.format(**self.fields)
        except (KeyError, IndexError):
            return f"{template} {self.fields}"

    @property
    def hint_filled(self) -> str:
        """The next command to run, with this error's fields in it."""
        return self._fill(type(self).hint)

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only constructors do not unpickle by default, and errors cross process borders.
        return (_rebuild, (type(self), self.fields))

    def as_dict(self) -> dict[str, Any]:
        """The error contract of ``--json``: code, message, hint, retryable, exit_code."""
        return {
            "code": self.code,
            "message": str(self),
            "hint": self.hint_filled,
            "retryable": self.retryable,
            "exit_code": self.exit_code,
        }


def _rebuild(kind: type[RideThroughError], fields: dict[str, Any]) -> RideThroughError:
    return kind(**fields)


class UsageError(RideThroughError):
    """{detail}"""

    code = "RT-002"
    exit_code = 2
    hint = "ridethrough --help"


class PlatformUnsupported(RideThroughError):
    """{what} needs Linux; on {platform} only the read verbs work"""

    code = "RT-003"
    exit_code = 2
    hint = "ridethrough ls RUN"


class StoreMissing(RideThroughError):
    """{detail}: {path}"""

    code = "RT-010"
    exit_code = 10
    hint = "ridethrough ls {path}"


class StoreLocked(RideThroughError):
    """run {path} is locked on this node by {holder}"""

    code = "RT-011"
    exit_code = 11
    retryable = True
    hint = "ridethrough status {path}"


class NothingRestorable(RideThroughError):
    """run {path} has made progress but none of its checkpoints can be restored: {detail}"""

    code = "RT-012"
    exit_code = 12
    hint = "ridethrough verify {path}   (or start over on purpose: ridethrough run --fresh)"


class StorageError(RideThroughError):
    """{detail}: {path}"""

    code = "RT-018"
    exit_code = 13
    hint = "ridethrough status"


class StorageUnreachable(StorageError):
    """storage cannot be used now ({detail}): {path}"""

    code = "RT-013"
    exit_code = 13
    retryable = True
    hint = "check the mount or server behind {path}, then run the same command again"


class TierMissing(StorageUnreachable):
    """run {run_uid} was at {path} before and its marker run.json is not there: disk not mounted?"""

    code = "RT-015"
    exit_code = 13
    hint = "mount the disk and run the same command again (or start over on purpose: ridethrough run --fresh)"


class StorageDenied(StorageError):
    """permission denied ({detail}): {path}"""

    code = "RT-016"
    exit_code = 13
    hint = "ls -ld {path}"


class StoreFull(StorageError):
    """no space left ({detail}): {path}"""

    code = "RT-014"
    exit_code = 14
    hint = "ridethrough du {path}"


class StoreReadOnly(StorageError):
    """storage is read-only ({detail}): {path}"""

    code = "RT-017"
    exit_code = 14
    hint = "mount | grep ' ro,'   (a file system remounts itself read-only after errors: see dmesg)"


class Damaged(RideThroughError):
    """{path} is damaged: {detail}"""

    code = "RT-040"
    exit_code = 1
    hint = "ridethrough verify RUN"


class FormatTooNew(RideThroughError):
    """{path} has format {found}, this version reads up to {known}"""

    code = "RT-041"
    exit_code = 2
    hint = "pip install -U ridethrough"


class ForeignRecord(RideThroughError):
    """{path} belongs to something else: {detail}"""

    code = "RT-042"
    exit_code = 1
    hint = "ridethrough ls RUN"


class TwoHeads(RideThroughError):
    """two attempts of {path} claim sequence number {seq}: {first} and {second}"""

    code = "RT-043"
    exit_code = 21
    hint = "ridethrough ls {path}   (move the directory of the wrong attempt out of attempts/)"


class StateNotExpressible(RideThroughError):
    """state at {path} cannot be saved without pickle: {detail}"""

    code = "RT-050"
    exit_code = 22
    hint = "give the object a state_dict() of tensors, numbers, strings, lists and dicts"


class StateMismatch(RideThroughError):
    """checkpoint does not fit {name}: {detail}"""

    code = "RT-051"
    exit_code = 22
    hint = "ridethrough show CKPT"


class StepOrder(RideThroughError):
    """ckpt.step() at step {step}: {detail}"""

    code = "RT-052"
    exit_code = 22
    hint = "call ckpt.step() once after optimizer.step(); for accumulation micro-batches ckpt.step(boundary=False)"


class MemoryTooSmall(RideThroughError):
    """snapshots need {needed_bytes} bytes of memory on this node, {available_bytes} are available"""

    code = "RT-053"
    exit_code = 21
    hint = "free memory, raise the cgroup limit, or use fewer ranks a node"


class SaveFailed(RideThroughError):
    """step {step} did not become durable within {waited_s:.0f} s: {detail}"""

    code = "RT-054"
    exit_code = 14
    hint = "ridethrough status RUN"


class ResumeRefused(RideThroughError):
    """step {step} of {path} is not resumed, it was made by something else: {detail}; to go on all the same set {allow}"""

    code = "RT-055"
    exit_code = 21
    hint = "ridethrough show {path} --explain"


class KeeperGone(RideThroughError):
    """the keeper process does not answer ({detail}): snapshots are not protected"""

    code = "RT-060"
    exit_code = 70
    retryable = True
    hint = "run the same command again: ridethrough run -- CMD"


class Fenced(RideThroughError):
    """attempt {attempt} may no longer write {path}: attempt {newer} owns the run"""

    code = "RT-061"
    exit_code = 21
    hint = "ridethrough status {path}"


class JobFailed(RideThroughError):
    """the training command failed in its own code: {detail}"""

    code = "RT-080"
    exit_code = 22
    hint = "fix the error above, then run the same command again"


class JobStuck(RideThroughError):
    """stopped, a person is needed: {detail}"""

    code = "RT-081"
    exit_code = 21
    hint = "ridethrough status RUN"


class DrillFailed(RideThroughError):
    """{detail}"""

    code = "RT-090"
    exit_code = 1
    hint = "ridethrough drill --json"


class Internal(RideThroughError):
    """internal error: {detail}"""

    code = "RT-070"
    exit_code = 70
    hint = "please report this with the output of the same command and -vv"


def all_errors() -> tuple[type[RideThroughError], ...]:
    """Every class of the tree, each once, parents before children."""
    found: list[type[RideThroughError]] = []
    queue: list[type[RideThroughError]] = [RideThroughError]
    while queue:
        kind = queue.pop(0)
        found.append(kind)
        queue.extend(kind.__subclasses__())
    return tuple(found)
