"""`ridethrough status`: how a run is doing, and what a power cut would cost now."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from ridethrough.cli import output
from ridethrough.cli.output import Column
from ridethrough.errors import KeeperGone, StorageUnreachable, StoreMissing
from ridethrough.seam import process
from ridethrough.seam.clock import SystemClock
from ridethrough.snapshot import link as names
from ridethrough.snapshot.address import find_socket
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.placement import REPLICA_LIMIT_BYTES
from ridethrough.snapshot.plan import first_save
from ridethrough.supervisor.policy import save_deadline_s

_STORAGE_S = 1.2
"""Longer than any healthy listing; with the keeper's answer it stays under two seconds."""
_KEEPER_S = 0.5
_SILENT_S = 2.0
_STRAY = 20
"""Refused packets below this are those of starts and restarts."""
_RANKS = (
    Column("RANK", is_right=True),
    Column("PID", is_right=True),
    Column("PHASE"),
    Column("STEP", is_right=True),
    Column("LAST STEP", is_right=True),
)


@click.command(
    epilog=output.help_end(
        ("ridethrough status runs/exp001", "ridethrough status --json runs/exp001 | jq .exposure"),
        {0: "answered (also if the run is not running)", 2: "usage", 10: "no run there", 13: "neither the keeper nor the storage answers"},
    )
)
@click.argument("run")
@output.json_option
@output.verbosity_option
def command(run: str, is_json: bool) -> None:
    """Say how a run is doing, and what a power cut would cost now.

    Answers within two seconds, also when the supervisor is dead or the storage
    hangs: what is live comes from the keeper's memory, what is on disk from a
    helper that is given up after a moment.
    """
    clock = SystemClock()
    run_dir = os.path.abspath(run)
    live = _ask_keeper(run_dir, clock.monotonic_s())
    storage = _ask_storage(run_dir)
    if live is None and not storage["answers"]:
        raise StorageUnreachable(path=run_dir, detail=f"no answer within {_STORAGE_S} s, and no keeper runs here")
    if live is None and storage["error"] is not None and storage["error"]["exit_code"] == StoreMissing.exit_code:
        raise StoreMissing(path=run_dir, detail="there is no run, and no keeper has one in memory", hint=storage["error"]["hint"])
    found: dict[str, Any] = {"run": {"path": run_dir}, "is_running": live is not None, **(live or _NOT_RUNNING), "storage": storage}
    if is_json:
        output.emit("ridethrough.status", found, now_at=clock.now_at())
    else:
        _show(run, found)


_NOT_RUNNING: dict[str, Any] = {
    "keeper": None,
    "launch": None,
    "attempt": None,
    "step": None,
    "posted_step": None,
    "durable": None,
    "verified": None,
    "exposure": None,
    "exposures": [],
    "nodes": None,
    "copies": [],
    "save": None,
    "alarms": [],
    "ranks": [],
}


def _ask_keeper(run_dir: str, now_s: float) -> dict[str, Any] | None:
    """What is live, from memory; None if no keeper keeps this run here. Never touches the run directory."""
    socket_path = find_socket(run_dir)
    if not socket_path:  # empty: a verb has the lock for a moment, and no keeper ever had it
        return None
    try:
        link = KeeperLink(socket_path, role="status", timeout_s=_KEEPER_S)
        look = link.request("look")
        held = link.names()
        control = link.board(names.CONTROL).read() if names.CONTROL in held else {}
        answer = link.board(names.PERSIST).read() if names.PERSIST in held else {}
        copies = link.board(names.COURIER).read() if names.COURIER in held else {}
        launch = int(control.get("launch", 0))
        tiers = {name.removeprefix(names.COPIER): link.board(name, size).read() for name, size in held.items() if name.startswith(names.COPIER)}
        boards = [link.board(name, size).read() for name, size in held.items() if name.startswith(f"{launch}/rank/")]
        plan = link.board(names.plan_board(launch), names.PLAN_BYTES).read() if names.plan_board(launch) in held else {}
        link.close()
    except KeeperGone as error:
        return {**_NOT_RUNNING, "keeper": {"pid": None, "answers": False}, "alarms": [f"the keeper does not answer: {error}"]}
    return _describe(look, control, answer, copies, tiers, sorted((b for b in boards if b), key=lambda b: int(b["rank"])), plan, now_s)


def _describe(
    look: dict[str, Any],
    control: dict[str, Any],
    answer: dict[str, Any],
    copies: dict[str, Any],
    tiers: dict[str, dict[str, Any]],
    ranks: list[dict[str, Any]],
    plan: dict[str, Any],
    now_s: float,
) -> dict[str, Any]:
    steps = [int(r["step"]) for r in ranks if int(r.get("step", -1)) >= 0]
    durable, verified, busy = answer.get("durable"), answer.get("verified"), answer.get("busy")
    helpers = {
        role: {"pid": h["pid"] or None, "is_alive": bool(h["pid"]) and process.is_alive(int(h["pid"])), "restarts": h["restarts"]}
        for role, h in look["helpers"].items()
    }
    return {
        "keeper": {"pid": look["keeper_pid"], "answers": True, **helpers},
        "launch": {"number": control.get("launch"), "command_pid": look["pid"] or None, "exit_status": look["status"]},
        "attempt": {**plan["attempt"], "restored_step": plan["restored_step"]} if plan else None,
        "step": max(steps, default=None),
        "posted_step": min((int(r.get("posted_step", -1)) for r in ranks), default=None) if ranks else None,
        "durable": _point(durable, now_s),
        "verified": _point(verified, now_s),
        "exposure": _exposure(steps, durable, plan, now_s),
        "exposures": _exposures(steps, durable, plan, control),
        "nodes": _nodes(control),
        "copies": [_copy(name, said, steps, now_s) for name, said in sorted(tiers.items()) if said],
        "save": {
            "next_step": control.get("announced") or (first_save(plan["restored_step"], plan["save_interval_steps"]) if plan else None),
            "interval_steps": (plan or {}).get("save_interval_steps"),
            "snapshot_interval_steps": (plan or {}).get("snapshot_interval_steps"),
            "in_progress": {"step": busy["step"], "phase": busy["phase"], "age_s": round(now_s - busy["since_s"], 2)} if busy else None,
            "last_s": answer.get("save_s"),
        },
        "alarms": [*_alarms(helpers, answer, copies, control, now_s), *_copy_alarms(tiers)],
        "ranks": [
            {
                "rank": r["rank"],
                "pid": r["pid"],
                "is_alive": process.is_alive(int(r["pid"]), r.get("process_started")),
                "phase": r.get("phase"),
                "step": r.get("step"),
                "step_age_s": round(now_s - r["step_at_s"], 2) if r.get("step_at_s") else None,
            }
            for r in ranks
        ],
    }


def _copy(name: str, said: dict[str, Any], steps: list[int], now_s: float) -> dict[str, Any]:
    """Of a tier: the newest checkpoint that is there, and what losing all others would cost."""
    done, busy = said.get("done"), said.get("busy")
    return {
        "tier": name,
        "place": said["place"],
        "domain": said["domain"],
        "step": done["step"] if done else None,
        "age_s": round(now_s - done["at_s"], 2) if done else None,
        "lost_steps": max(steps) - int(done["step"]) if done and steps else None,
        "in_progress": {"step": busy["step"], "copied_bytes": busy["copied_bytes"], "age_s": round(now_s - busy["since_s"], 2)} if busy else None,
        "failures_in_a_row": said["failures_in_a_row"],
    }


def _copy_alarms(tiers: dict[str, dict[str, Any]]) -> list[str]:
    failing = {name: said for name, said in sorted(tiers.items()) if said.get("failures_in_a_row")}
    return [
        f"{said['failures_in_a_row']} copies to {name} in a row failed, the last at step {said['failed']['step']}: {said['failed']['message']}"
        for name, said in failing.items()
    ]


def _point(value: dict[str, Any] | None, now_s: float) -> dict[str, Any] | None:
    return {"step": value["step"], "save_id": value["save_id"], "age_s": round(now_s - value["at_s"], 2)} if value else None


def _exposure(steps: list[int], durable: dict[str, Any] | None, plan: dict[str, Any], now_s: float) -> dict[str, Any] | None:
    """What would be lost if everything here went dark now; with no topology known that is all that can be said."""
    if not steps or not plan:
        return None
    if durable is not None and durable["step"] >= plan["restored_step"]:
        return {"scope": "everything dark", "steps": max(steps) - int(durable["step"]), "age_s": round(now_s - durable["captured_s"], 2)}
    return {"scope": "everything dark", "steps": max(steps) - int(plan["restored_step"]), "age_s": None}


def _exposures(steps: list[int], durable: dict[str, Any] | None, plan: dict[str, Any], control: dict[str, Any]) -> list[dict[str, Any]]:
    """What smaller losses would cost: memory on other nodes survives them. Known to the lead alone."""
    if not steps or not plan or not control.get("is_lead"):
        return []
    on_disk = max(int(plan["restored_step"]), int(durable["step"]) if durable else -1)
    return [{"scope": scope, "steps": max(steps) - max(int(step), on_disk)} for scope, step in (control.get("survives") or {}).items()]


def _nodes(control: dict[str, Any]) -> dict[str, Any] | None:
    """Who decides, and who is heard; None for a job of one node."""
    said = (control.get("memory") or {}).get("directive") or {}
    if len(said.get("members") or ()) < 2 and not control.get("peer_port"):
        return None
    return {
        "lead": said.get("lead"),
        "is_lead": bool(control.get("is_lead")),
        "stage": said.get("stage", "calling"),
        "members": said.get("members") or [],
        "silent_s": control.get("silent_s") or {},
        "port": control.get("peer_port"),
        "refused_packets": control.get("refused_packets") or {},
    }


def _alarms(helpers: dict[str, Any], answer: dict[str, Any], copies: dict[str, Any], control: dict[str, Any], now_s: float) -> list[str]:
    alarms = [f"the {role} is being restarted" for role, h in helpers.items() if not h["is_alive"]]
    busy = answer.get("busy")
    if busy and now_s - busy["since_s"] > save_deadline_s(answer.get("save_s")):
        alarms.append(
            f"the save of step {busy['step']} has been {busy['phase']} for {now_s - busy['since_s']:.0f} s: storage does not answer, or is slow"
        )
    if answer.get("failures_in_a_row"):
        failed = answer["failed"]
        alarms.append(f"{answer['failures_in_a_row']} saves in a row failed, the last at step {failed['step']}: {failed['message']}")
    if answer.get("diverged"):
        d = answer["diverged"]
        alarms.append(f"ranks {d['ranks']} differ in {', '.join(d['tensors'])} at step {d['step']}: silent divergence")
    if answer.get("journal_error"):
        alarms.append(f"the journal cannot be written: {answer['journal_error']}")
    if copies.get("too_large"):
        ranks = ", ".join(str(rank) for rank in copies["too_large"])
        alarms.append(f"private parts of rank {ranks} are above {REPLICA_LIMIT_BYTES >> 10} KiB: no other node holds them before they are saved")
    refused = {reason: count for reason, count in (control.get("refused_packets") or {}).items() if count > _STRAY}
    if refused:
        alarms.append(f"packets refused: {', '.join(f'{count} {reason}' for reason, count in refused.items())}; the same key and run on every node?")
    if control.get("suspected"):
        alarms.append("steps are overdue")
    return alarms


def _ask_storage(run_dir: str) -> dict[str, Any]:
    done = process.run_abandoning([sys.executable, "-m", "ridethrough", "ls", "--json", run_dir], timeout_s=_STORAGE_S)
    if done is None:
        return {"answers": False, "newest_restorable": None, "error": None}
    code, text = done
    if code:
        missing = code == StoreMissing.exit_code
        hint = "ridethrough run --run DIR -- CMD" if missing else f"ridethrough ls {output.quote(run_dir)}"
        return {"answers": True, "newest_restorable": None, "error": {"exit_code": code, "hint": hint}}
    return {"answers": True, "newest_restorable": json.loads(text)["restart"], "error": None}


def _show(shown: str, found: dict[str, Any]) -> None:
    rows: list[tuple[str, output.Cell]] = [("run", shown)]
    rows.append(("state", _state(found)))
    if found["attempt"]:
        rows.append(("attempt", f"{found['attempt']['seq']}, resumed from step {found['attempt']['restored_step']}"))
    if found["is_running"]:
        rows.append(("step", _text(found["step"])))
        rows.append(("in memory", _text(found["posted_step"], "step {} on every rank: survives the trainers, not the power")))
        rows.append(("durable", _when(found["durable"])))
        rows.append(("verified", _when(found["verified"])))
        rows.append(("exposure", _lost(found["exposure"])))
        rows += [("", f"if {e['scope']} went dark now: {e['steps']} steps would be lost") for e in found["exposures"]]
        rows += [("copy" if not i else "", _copied(c)) for i, c in enumerate(found["copies"])]
        rows.append(("next save", _text((found["save"] or {}).get("next_step"), "step {}")))
        busy = (found["save"] or {}).get("in_progress")
        if busy:
            rows.append(("saving", f"step {busy['step']}, {busy['phase']} for {busy['age_s']} s"))
    if found["nodes"] is not None:
        rows.append(("nodes", _who(found["nodes"])))
    storage = found["storage"]
    restart = storage["newest_restorable"]
    if not storage["answers"]:
        rows.append(("storage", f"no answer within {_STORAGE_S} s"))
    elif storage["error"]:
        rows.append(("storage", f"cannot be read (exit {storage['error']['exit_code']}): {storage['error']['hint']}"))
    else:
        rows.append(("on disk", f"a restart restores step {restart['step']}" if restart else "nothing to restore yet"))
    output.fields(rows)
    for alarm in found["alarms"]:
        output.line(f"alarm: {alarm}")
    if found["ranks"]:
        output.line("")
        output.table(_RANKS, [_rank_row(r) for r in found["ranks"]])


def _state(found: dict[str, Any]) -> str:
    if not found["is_running"]:
        return "not running on this node"
    keeper = found["keeper"]
    if not keeper["answers"]:
        return "the keeper does not answer"
    return f"running, launch {found['launch']['number']}, keeper {keeper['pid']}"


def _who(nodes: dict[str, Any]) -> str:
    if not nodes["is_lead"]:
        return f"{len(nodes['members'])}, led by {nodes['lead']}: ask there for what losing a node would cost"
    silent = [f"{n} {s:.0f} s" if s is not None else f"{n} (never heard)" for n, s in nodes["silent_s"].items() if s is None or s > _SILENT_S]
    return f"{len(nodes['members'])}, led from here; " + (f"silent: {', '.join(silent[:8])}" if silent else "all are heard")


def _rank_row(rank: dict[str, Any]) -> tuple[output.Cell, ...]:
    phase = str(rank["phase"]) if rank["is_alive"] else f"{rank['phase']} (process is gone)"
    age = f"{rank['step_age_s']:.1f} s ago" if rank["step_age_s"] is not None else output.UNKNOWN
    return str(rank["rank"]), str(rank["pid"]), phase, _text(rank["step"]), age


def _copied(copy: dict[str, Any]) -> str:
    there = f"step {copy['step']}, {output.human_age(copy['age_s'])} ago" if copy["step"] is not None else "nothing yet"
    busy = copy["in_progress"]
    now = f"; step {busy['step']} is on its way, {output.human_bytes(busy['copied_bytes'])}" if busy else ""
    return f"in {copy['domain']} ({copy['place']}): {there}{now}"


def _text(value: object, form: str = "{}") -> str:
    return output.UNKNOWN if value is None or value == -1 else form.format(value)


def _when(point: dict[str, Any] | None) -> str:
    return f"step {point['step']}, {output.human_age(point['age_s'])} ago" if point else "nothing yet"


def _lost(exposure: dict[str, Any] | None) -> str:
    if exposure is None:
        return output.UNKNOWN
    age = f", {exposure['age_s']:.1f} s" if exposure["age_s"] is not None else ""
    return f"if all power failed now: {exposure['steps']} steps{age} would be lost"
