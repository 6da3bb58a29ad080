"""Loads the newest intact checkpoint without ridethrough: `python load_without_ridethrough.py RUN_DIR` (numpy, xxhash)."""

import glob
import hashlib
import json
import os
import sys

import numpy
import xxhash

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2"}
DTYPES |= {"U8": "u1", "BOOL": "?", "C64": "<c8", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1"}  # BF16 and F8: raw bits


def records(pattern):
    """Every intact record whose path matches, with its path; its last line is the sha256 of what stands before it."""
    for path in sorted(glob.glob(pattern)):
        with open(path, "rb") as file:
            data = file.read()
        body = data[len(b'{"record": ') : -len(b',\n"sha256": ""}\n') - 64]
        if data[-67:-3] == hashlib.sha256(body).hexdigest().encode():
            yield path, json.loads(body)


def load_part(path, seal):
    """Arrays by name, and the state tree (JSON, with {"~": tag} for what JSON lacks); None if the payload is damaged."""
    payload = seal["payload"]
    place = os.path.join(os.path.dirname(path), payload["name"])
    with open(place if os.path.exists(place) else os.devnull, "rb") as file:
        data = file.read()
    chunks = [data[at : at + payload["chunk_bytes"]] for at in range(0, len(data), payload["chunk_bytes"])]
    if [xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks] != payload["xxh3_128"]:
        return None
    at = 8 + int.from_bytes(data[:8], "little")
    return {n: numpy.frombuffer(data[at + b : at + e], DTYPES[t]).reshape(shape) for n, t, shape, b, e in seal["tensors"]}, seal["tree"]


def load(run_dir):
    """Step and parts of the newest checkpoint on the newest attempt's lineage whose every part is intact."""
    root = glob.escape(run_dir)
    parents = {a["attempt"]["nonce"]: a["parent"] for _, a in records(f"{root}/attempts/*/attempt.json")}
    needed = {r["attempt"]["nonce"]: {p["name"] for p in r["parts"]} for _, r in records(f"{root}/attempts/*/roster.json")}
    seals = list(records(f"{root}/step-*/*.seal"))
    head = max((a["attempt"] for _, a in records(f"{root}/attempts/*/attempt.json")), key=lambda attempt: attempt["seq"])
    nonce, last = head["nonce"], float("inf")
    while nonce is not None:
        for step in sorted({s["step"] for _, s in seals if s["attempt"]["nonce"] == nonce and s["step"] <= last}, reverse=True):
            mine = [(s["part"], load_part(path, s)) for path, s in seals if (s["attempt"]["nonce"], s["step"]) == (nonce, step)]
            parts = {name: part for name, part in mine if part is not None}
            if needed.get(nonce, {"its roster"}) <= parts.keys():
                return step, parts
        nonce, last = (parents[nonce]["nonce"], parents[nonce]["step"]) if parents.get(nonce) else (None, None)
    raise SystemExit(f"{run_dir}: no checkpoint is intact")


if __name__ == "__main__":
    found_step, found = load(sys.argv[1])
    print(json.dumps({"step": found_step, "parts": {n: {k: hashlib.sha256(a).hexdigest() for k, a in p[0].items()} for n, p in found.items()}}))
