"""What is left out of what is shown, and what is not."""

from __future__ import annotations

import pytest

from accelmark.spec.secret import is_secret, secrets_in, shown, without_userinfo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a @ https://bob:h@nter2@host/x@y and b@c", "a @ https://(left out)@host/x@y and b@c"),
        ("git+https://token@host", "git+https://(left out)@host"),
        ("git+ssh://git@host/x ssh://u:p@host", "git+ssh://git@host/x ssh://(left out)@host"),
        ("https://host/simple?a=b@c https://(left out)@host", "https://host/simple?a=b@c https://(left out)@host"),
        (r'"https://host\nsomebody@host"', r'"https://host\nsomebody@host"'),
    ],
)
def test_only_the_user_part_of_an_address_is_left_out(text: str, expected: str) -> None:
    assert without_userinfo(text) == expected


def test_secret_names_are_recognised() -> None:
    assert all(map(is_secret, ("HF_TOKEN", "aws_secret_access_key", "PGPASSWORD", "MY_AUTH")))
    assert not any(map(is_secret, ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "AUTHOR")))


def test_secrets_are_found_and_replaced_everywhere() -> None:
    plan = {"environment": {"A_KEY": "sesame", "B_KEY": "true", "N": "1"}, "options": ["--env=C_TOKEN=tulip"], "n": 1}
    assert set(secrets_in(plan)) == {"sesame", "tulip"}
    expected = {
        "environment": {"A_KEY": "(left out)", "B_KEY": "(left out)", "N": "1"},
        "options": ["--env=C_TOKEN=(left out)"],
        "n": 1,
    }
    assert shown(plan, secrets_in(plan)) == expected
