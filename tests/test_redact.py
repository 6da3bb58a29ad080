"""Secrets are removed wherever they stand; innocent words stay."""

from __future__ import annotations

import timeit
import traceback
from typing import Any

import pytest

from ridethrough.redact import REDACTED, redact, redact_argv, redact_text, secret_values

CANARY = "c4n4ry-5up3r"


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", f"--token={CANARY}"],
        ["train.py", "--token", CANARY],
        ["train.py", "-token", CANARY],
        ["train.py", "--hf-token", CANARY, "--lr", "1"],
        ["train.py", "--wandb_api_key", CANARY],
        ["train.py", f"--api-key={CANARY}"],
        ["train.py", f"API_KEY={CANARY}"],
        ["train.py", f"--db.password={CANARY}"],
        ["train.py", "--passphrase", CANARY],
        ["train.py", f"--url=https://user:{CANARY}@host/x"],
        ["train.py", f"https://{CANARY}@host/x"],
        ["train.py", f"postgresql+psycopg://user:{CANARY}@host:5432/db"],
        ["train.py", f"https://user:p@{CANARY}@host/x"],
        ["train.py", f"https://b.s3.amazonaws.com/k?X-Amz-Signature={CANARY}&X-Amz-Date=1"],
        ["train.py", f"https://acc.blob.core.windows.net/c?sv=1&sig={CANARY}"],
        ["train.py", f"https://storage.googleapis.com/b/o?X-Goog-Credential={CANARY}"],
        ["train.py", f"https://host/?access_token={CANARY}#x"],
        ["curl", "-H", f"Authorization: Bearer {CANARY}"],
        ["curl", "-H", f"authorization: Basic {CANARY}"],
        ["train.py", "--config", f'{{"secret": "{CANARY}", "lr": 1}}'],
        ["train.py", f"--override=optimizer.private_key='{CANARY}'"],
    ],
    ids=lambda argv: " ".join(argv),
)
def test_a_secret_in_a_command_line_is_removed(argv: list[str]) -> None:
    cleaned = redact_argv(argv)
    assert CANARY not in " ".join(cleaned)
    assert REDACTED in " ".join(cleaned)
    assert cleaned[0] == argv[0]


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "aB3" * 8,
        "ghp_" + "aB3" * 10,
        "github_pat_" + "aB3" * 10,
        "glpat-" + "aB3" * 7,
        "sk-" + "aB3" * 9,
        "xoxb-" + "123-" * 5,
        "AKIA" + "ABCDEFGH12345678",
    ],
)
def test_a_token_is_known_by_its_shape_alone(token: str) -> None:
    assert redact_text(f"got {token} from the server") == f"got {REDACTED} from the server"


def test_a_private_key_is_removed_also_where_it_was_cut_off() -> None:
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}\n"
    assert CANARY not in redact_text(key)
    assert redact_text(key + "-----END RSA PRIVATE KEY-----\nafter").endswith("after")


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "my_passwd", "AZURE_CREDENTIAL", "auth_key"])
def test_the_value_of_a_secret_variable_is_removed_wherever_it_appears(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, CANARY)
    assert redact_text(f"loading x{CANARY}y") == f"loading x{REDACTED}y"


def test_the_longer_of_two_secrets_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdef")
    monkeypatch.setenv("B_TOKEN", "abcdef-and-more")
    assert redact_text("abcdef-and-more") == REDACTED


def test_credentials_in_a_git_remote_are_removed_and_the_rest_stays() -> None:
    remote = f"https://oauth2:{CANARY}@gitlab.example.com/team/model.git"
    assert redact_text(remote) == f"https://{REDACTED}@gitlab.example.com/team/model.git"


def test_a_secret_in_a_traceback_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", CANARY)
    try:
        raise ConnectionError(f"cannot open https://me:{CANARY}@host with {CANARY}")
    except ConnectionError:
        text = traceback.format_exc()
    assert CANARY in text
    assert CANARY not in redact_text(text)


NESTED: list[Any] = [
    {"password": CANARY},
    {"env": {"API_KEY": CANARY, "lr": "1"}},
    [["--x", f"token={CANARY}"]],
    ({"a": (f"https://u:{CANARY}@h",)},),
    {f"https://u:{CANARY}@h": 1},
    {"error": ValueError(f"token={CANARY}")},
    {"auth_key": f"{CANARY}"},
]


@pytest.mark.parametrize("value", NESTED, ids=str)
def test_a_secret_at_any_depth_of_a_record_is_removed(value: Any) -> None:
    assert CANARY not in str(redact(value))


INNOCENT = [
    "--tokenizer gpt2",
    "--tokenizer=gpt2",
    "max_tokens=5",
    "--max-tokens 5",
    "num_tokens: 12",
    "keyboard=us",
    "monkey=1",
    "--monkey patch",
    "TOKENIZERS_PARALLELISM=false",
    "git@github.com:org/repo.git",
    "https://github.com/org/repo.git",
    "https://host/a?step=5&signal=9",
    "mail me@example.com",
    "sk-learn",
    "keys: 3",
    "epoch 3 loss=0.25 lr=1e-4",
]


@pytest.mark.parametrize("text", INNOCENT)
def test_innocent_text_stays_as_it_is(text: str) -> None:
    assert redact_text(text, secrets=()) == text
    assert redact_argv(text.split(" ")) == text.split(" ")


def test_numbers_and_flags_stay_what_they_are() -> None:
    value = {"step": 3, "loss": 0.5, "ok": True, "none": None, "max_tokens": "5", "token": ""}
    assert redact(value) == value


@pytest.mark.parametrize(
    ("name", "value"), [("MY_TOKEN", "abc"), ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/key.json"), ("HOME", CANARY), ("TOKENIZER", CANARY)]
)
def test_short_values_paths_and_other_variables_are_no_secrets(name: str, value: str) -> None:
    assert secret_values({name: value}) == ()


def test_redacting_twice_changes_nothing() -> None:
    once = redact_text(f"--token={CANARY} https://u:{CANARY}@h/?sig={CANARY}")
    assert redact_text(once) == once


@pytest.mark.parametrize(
    "word", ["x", "-", ".", "a.", "token", "a-token.", "=", "://", "a://", "@", "?", "?token", "bearer ", "-----BEGIN ", " ", "\n"]
)
def test_a_long_line_without_secrets_does_not_stop_the_supervisor(word: str) -> None:
    text = word * (200_000 // len(word))
    used_s = timeit.timeit(lambda: redact_text(text, secrets=()), number=1)
    assert used_s < 5, f"{len(text)} characters took {used_s:.1f} s"
