"""What happens after a power cut and what a person does about it, from the configuration alone. Pure.

The five questions of a recovery strategy, each with its answer; then the course of events, step by step.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridethrough.config import Config
from ridethrough.config_rules import PORTS_COUNT
from ridethrough.errors import JobStuck, StorageUnreachable, TwoHeads
from ridethrough.supervisor.muster import spelled

_HASTY_S = 120.0
"""Few servers are through firmware, boot and mounts in less."""
_NAMED = 8
_UNREACHABLE = f"Exit {StorageUnreachable.exit_code}; the error names the path. YOU: mount it, then give the same command."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and where it came from."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of the five, and what follows from its answer."""

    number: int
    question: str
    settings: tuple[Setting, ...]
    meaning: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens, or is to be done, then."""

    when: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What follows from one kind of cut, in order."""

    title: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to type, and what for."""

    command: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What a reader of the plan should know before the night on which it is needed."""

    key: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Who hosts, and who does when that node is dark."""

    host: str | None
    address: str | None
    ports: tuple[int, ...]
    successors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runbook:
    """The whole plan."""

    questions: tuple[Question, ...]
    rendezvous: Rendezvous
    courses: tuple[Course, ...]
    commands: tuple[Command, ...]
    warnings: tuple[Remark, ...]

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def runbook(config: Config, *, run: str, command: str) -> Runbook:
    """The plan that this configuration amounts to.

    Args:
        config: The site's decisions.
        run: The run directory as a shell takes it, or a word that stands for it.
        command: What is given on every node, as a shell takes it.
    """
    return Runbook(
        questions=_questions(config),
        rendezvous=_rendezvous(config),
        courses=(_some_dark(config), _all_dark(config)) if config.nodes else (_all_dark(config),),
        commands=_commands(config, run, command),
        warnings=_warnings(config),
    )


# -- the five questions --------------------------------------------------------------------------------------------------


def _questions(config: Config) -> tuple[Question, ...]:
    asked = (
        ("Where is the step recorded?", ("run", "storage"), _recorded(config)),
        ("Which paths must every node reach?", ("recovery.paths",), _paths(config)),
        ("In which order does it start?", ("recovery.start_order", *(("nodes",) if config.nodes else ())), _order(config)),
        ("How long to wait for missing nodes, and then?", ("recovery.wait_for_nodes", "recovery.then", "recovery.min_nodes"), _waiting(config)),
        ("Continue or roll back?", ("recovery.resume",), _resuming(config)),
    )
    return tuple(
        Question(number=number, question=question, settings=tuple(_setting(config, key) for key in keys), meaning=meaning)
        for number, (question, keys, meaning) in enumerate(asked, start=1)
    )


def _setting(config: Config, key: str) -> Setting:
    recovery = config.recovery
    values = {
        "run": config.run or "not set",
        "storage": config.storage,
        "nodes": listed(config.order),
        "recovery.paths": ", ".join(recovery.paths) or "none",
        "recovery.start_order": ", ".join(recovery.start_order),
        "recovery.wait_for_nodes": spelled(recovery.wait_for_nodes_s),
        "recovery.then": recovery.then,
        "recovery.min_nodes": str(recovery.min_nodes),
        "recovery.resume": recovery.resume,
    }
    return Setting(key=key, value=values[key], origin=config.origin(key))


def _recorded(config: Config) -> tuple[str, ...]:
    where = "In that directory" if config.run else "In the directory that the script's Checkpointer names"
    kinds = {
        "shared": "which every node sees. Each part of a save is written once, and counts when it is sealed there.",
        "node-local": "which every node has for itself. Each node writes what it holds; the union of the nodes counts.",
        "detect": "Whether all nodes see the same one is found out at each start, and must be as it was before.",
    }
    joint = "." if config.storage == "detect" else ","
    said = f"{where}{joint} {kinds[config.storage]}"
    return (said if len(config.nodes) > 1 else f"{where}. A save counts when all its parts are sealed there.",)


def _paths(config: Config) -> tuple[str, ...]:
    if not config.has_gates:
        return ("Nothing is waited for with one node and no paths: a start that cannot use its storage says so and ends.",)
    run = config.run or "the run directory, once it is known"
    return (
        f"A node is ready when it can write to {run}"
        + (f" and read {', '.join(config.recovery.paths)}" if config.recovery.paths else "")
        + ". Asked again every second; what does not answer is named and waited for.",
    )


def _order(config: Config) -> tuple[str, ...]:
    rendezvous = _rendezvous(config)
    way = f"interface {config.peers.interface} has its address" if config.peers.interface else "there is a way to another node"
    if rendezvous.host is None:
        gates = {
            "storage": "the paths of question 2" if config.has_gates else "not waited for",
            "network": way if config.peers.interface else "nothing to wait for on one node",
            "rendezvous": "left to the launcher",
            "workers": "the command is started",
        }
    else:
        ports = f"ports {rendezvous.ports[0]} to {rendezvous.ports[-1]}, one after the other"
        then = f"; if it is dark {' then '.join(rendezvous.successors[:2])}" if rendezvous.successors else ""
        gates = {
            "storage": "the paths of question 2",
            "network": way,
            "rendezvous": f"{rendezvous.host} hosts at {rendezvous.address}, {ports}{then}",
            "workers": "the command is started on all nodes at once",
        }
    return tuple(f"{number}. {gate}: {gates[gate]}" for number, gate in enumerate(config.recovery.start_order, start=1))


def _rendezvous(config: Config) -> Rendezvous:
    first = config.recovery.rendezvous_port
    ports = tuple(range(first, first + PORTS_COUNT))
    if len(config.nodes) < 2:
        return Rendezvous(host=None, address=None, ports=(), successors=())
    return Rendezvous(host=config.nodes[0].name, address=config.nodes[0].address, ports=ports, successors=config.order[1:])


def _waiting(config: Config) -> tuple[str, ...]:
    recovery = config.recovery
    wait = spelled(recovery.wait_for_nodes_s)
    if not config.has_gates:
        return ("Nothing is waited for with one node and no paths.",)
    if len(config.nodes) < 2:
        return (f"There is one node: it waits for its storage, at most {wait}, and then stops for a person (exit {JobStuck.exit_code}).",)
    if recovery.then == "stop":
        return (f"All {len(config.nodes)} nodes start together, or after {wait} none does: exit {JobStuck.exit_code}, a person decides.",)
    return (
        f"All {len(config.nodes)} nodes start together; after {wait} those that are ready go on if they are at least {recovery.min_nodes}, "
        f"else exit {JobStuck.exit_code}. Only one half of a divided room can: it claims the next attempt on the shared run directory.",
    )


def _resuming(config: Config) -> tuple[str, ...]:
    if config.recovery.resume == "roll-back":
        return ("From the newest verified checkpoint on storage. Newer steps in memory are not used.",)
    if len(config.nodes) < 2:
        return ("From the newest complete step: in memory if that survived, else on storage.",)
    return ("From the newest step of which every part survives: in the memory of some node, else on storage.",)


# -- the course of events ------------------------------------------------------------------------------------------------


def _some_dark(config: Config) -> Course:
    peers, recovery = config.peers, config.recovery
    victim = config.order[-1]
    others = "the others" if len(config.nodes) > 2 else config.order[0]
    is_back = recovery.resume == "roll-back"
    restored = "the newest verified checkpoint" if is_back else "the newest step that survives in memory or on storage"
    saved, kept = ("", "") if is_back else ("what is in memory elsewhere is made durable, ", ", the memory is kept")
    steps = [
        Step(when="0 s", what=f"The power of {victim}, say, is cut. Training on {others} stands still, waiting for it."),
        Step(when=spelled(peers.suspect_s), what=f"{victim} is suspected: {saved}nothing is stopped; if {victim} speaks again, training goes on."),
        Step(
            when=spelled(peers.dead_s),
            what=f"{victim} is given up, if no rank has made a step meanwhile: the trainers on {others} are stopped{kept}.",
        ),
        Step(
            when="from then",
            what=f"{f'{others} waits' if len(config.nodes) == 2 else 'The others wait'} for {victim}, at most "
            f"{spelled(recovery.wait_for_nodes_s)}. YOU: bring {victim} up and give the same command there. Leave {others} alone.",
        ),
        Step(when="all are ready", what=f"All start at once, {config.order[0]} hosts the rendezvous, and resume from {restored}. Done."),
    ]
    if recovery.then == "stop":
        late = f"The command ends on every node with exit {JobStuck.exit_code}. YOU: repair, then give the same command on all nodes."
    elif recovery.min_nodes >= len(config.nodes):
        late = f"min_nodes is {recovery.min_nodes}, so nobody goes on without it: exit {JobStuck.exit_code} on every node."
    else:
        late = (
            f"The nodes that are ready go on without it, if they are at least {recovery.min_nodes}. No sample is lost or repeated. A half that "
            f"comes second is refused ({TwoHeads.code}, exit {TwoHeads.exit_code}). {victim} takes part again from the next start on."
        )
    steps.append(Step(when=f"{spelled(recovery.wait_for_nodes_s)} later", what=late))
    return Course(title="IF A PART OF THE ROOM GOES DARK", steps=tuple(steps))


def _all_dark(config: Config) -> Course:
    is_alone = len(config.nodes) < 2
    whose = "this node" if is_alone else "every node"
    steps = [
        Step(when="0 s", what=f"The power of {whose} is cut. What was only in memory is gone; what is durable on storage is not."),
        Step(
            when="power is back",
            what=f"YOU: give the same command {'again' if is_alone else 'on every node, in any order'}. A unit file or job script may do it.",
        ),
    ]
    if is_alone:
        steps.append(Step(when="storage answers", what="The command starts and resumes from the newest intact checkpoint. Done."))
        if not config.has_gates:
            steps.append(Step(when="if it does not", what=_UNREACHABLE))
            return Course(title="IF THIS NODE GOES DARK", steps=tuple(steps))
        end = f"exit {JobStuck.exit_code}; the last line names the path. YOU: mount it, then give the same command."
    else:
        steps.append(
            Step(when="all are ready", what=f"{_rendezvous(config).host} hosts the rendezvous; all resume from the newest intact checkpoint. Done.")
        )
        end = "what is missing is named, and as above " + (
            "those that are ready go on." if config.recovery.then == "shrink" else f"all end with exit {JobStuck.exit_code}."
        )
    steps.append(Step(when=f"after {spelled(config.recovery.wait_for_nodes_s)}", what=end[0].upper() + end[1:]))
    return Course(title="IF THIS NODE GOES DARK" if is_alone else "IF THE WHOLE ROOM GOES DARK", steps=tuple(steps))


def _commands(config: Config, run: str, command: str) -> tuple[Command, ...]:
    found = [
        Command(command=f"ridethrough status {run}", purpose="what it does or waits for; what a cut would cost now"),
        Command(command=f"ridethrough ls {run}", purpose="the checkpoints; * is what a restart restores"),
        Command(command=f"ridethrough verify {run}", purpose="whether their bytes are intact; changes nothing"),
        Command(command=command, purpose="on every node: start or go on; CMD as before" if config.nodes else "start or go on; CMD as before"),
    ]
    if len(config.nodes) > 1 and config.storage != "node-local":
        hurried = {"STORAGE": "shared", "RECOVERY_THEN": "shrink", "RECOVERY_WAIT_FOR_NODES": "30s"}
        decided = {"STORAGE": config.storage, "RECOVERY_THEN": config.recovery.then}
        variables = " ".join(f"RIDETHROUGH_{name}={value}" for name, value in hurried.items() if decided.get(name) != value)
        found.append(Command(command=f"{variables} {command}", purpose="on the nodes that are up, stopped before: go on without the rest"))
    return tuple(found)


# -- warnings ------------------------------------------------------------------------------------------------------------


def _warnings(config: Config) -> tuple[Remark, ...]:
    recovery, nodes = config.recovery, config.nodes
    wait = spelled(recovery.wait_for_nodes_s)
    domains = set(config.domains.values())
    is_several = len(nodes) > 1
    found = (
        (not nodes, "nodes", "no nodes are configured: this is the plan of one node. Nobody would wait for others or move the rendezvous."),
        (not config.run, "run", "the run directory is not set: nothing is on record before the script names it."),
        (
            is_several and len(domains) == 1,
            "nodes",
            f"all nodes are in one power domain ({next(iter(domains), '')}): a cut of it takes every copy in memory. Only storage survives it.",
        ),
        (
            is_several and all(node.domain == node.name for node in nodes),
            "nodes",
            "no power domains are configured: nodes that share a rack or PDU count as independent, and may hold each other's only copy.",
        ),
        (
            is_several and config.storage == "detect",
            "storage",
            "storage is not declared: a shared file system that is mounted nowhere would be taken for node-local disks.",
        ),
        (
            config.storage == "node-local",
            "storage",
            "storage is node-local: a disk that is lost takes its checkpoints with it, and shrinking is not possible.",
        ),
        (
            is_several and recovery.then == "stop",
            "recovery.then",
            f'then is "stop": one node that is not back in {wait} ends the run until a person acts.',
        ),
        (
            is_several and recovery.then == "shrink" and config.storage == "detect",
            "recovery.then",
            'after a cut of the whole room nobody knows yet that the run directory is shared: shrinking then needs storage = "shared".',
        ),
        (
            is_several and recovery.then == "shrink" and recovery.min_nodes == len(nodes),
            "recovery.min_nodes",
            "min_nodes is the number of nodes: the run never shrinks.",
        ),
        (
            recovery.then == "stop" and "recovery.min_nodes" in config.origins,
            "recovery.min_nodes",
            'min_nodes has no effect: then is "stop".',
        ),
        (
            recovery.wait_for_nodes_s < _HASTY_S,
            "recovery.wait_for_nodes",
            f"{wait} is short for machines that boot and mount after a power cut: the run may be over before they are up.",
        ),
        (
            recovery.resume == "roll-back",
            "recovery.resume",
            "roll-back gives up the steps since the last verified checkpoint, even where memory has them.",
        ),
        (
            not recovery.paths,
            "recovery.paths",
            "no paths are configured: a data set that is not mounted is noticed by your script, not waited for.",
        ),
        (
            is_several and any(not _is_number(node.address) for node in nodes),
            "nodes",
            "addresses are host names: a name server or hosts file must answer before the nodes can find each other.",
        ),
    )
    return tuple(Remark(key=key, text=text) for is_so, key, text in found if is_so)


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def listed(names: Sequence[str]) -> str:
    """The names, or the first few and how many more."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
