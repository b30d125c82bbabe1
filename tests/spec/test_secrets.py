import pytest

from agent.core.problem import secret_name, secret_setting
from tests.spec.base import edited, problems, refused

VALUE = "correct-horse-battery"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrSt"

GIVEN = [
    ("OMP_NUM_THREADS: 8", f"HF_TOKEN: {VALUE}", VALUE),
    ("OMP_NUM_THREADS: 8", f"OPENAI_API_KEY: {VALUE}", VALUE),
    ("OMP_NUM_THREADS: 8", f"DB_PASSWORD: {VALUE}", VALUE),
    ("OMP_NUM_THREADS: 8", "WANDB_API_KEY: 918273645", "918273645"),
    ("OMP_NUM_THREADS: 8", f"HARMLESS: {TOKEN}", TOKEN),
    ("OMP_NUM_THREADS: 8", "HARMLESS: sk-abcdef0123456789", "sk-abcdef0123456789"),
    ("OMP_NUM_THREADS: 8", "PROXY: http://user:hunter2@proxy:3128", "hunter2"),
    ("tp-size: 2", f"api-key: {VALUE}", VALUE),
    ("tp-size: 2", f"admin-api-key: {VALUE}", VALUE),
    ("tp-size: 2", f"ssl-keyfile-password: {VALUE}", VALUE),
    ("tp-size: 2", f"--api-key: {VALUE}", VALUE),
    ("tp-size: 2", f"served-model-name: {TOKEN}", TOKEN),
    ("tp-size: 2", f"allowed: [x, {TOKEN}]", TOKEN),
    ("NCCL_DEBUG: INFO", f"NCCL_NET: {TOKEN}", TOKEN),
]


@pytest.mark.parametrize(("old", "new", "value"), GIVEN)
def test_S13_a_secret_given_as_a_value_is_refused_and_never_repeated(old, new, value):
    found = refused((old, new))
    assert any('expected it under "secrets"' in line for line in found)
    assert not any(value in line for line in found)


@pytest.mark.parametrize(
    "text",
    [
        edited(("HF_TOKEN: /etc/secrets/hf", f"HF_TOKEN: {TOKEN}")),
        edited(("HF_TOKEN: /etc/secrets/hf", f"HF_TOKEN: {VALUE}")),
        edited(("HF_TOKEN: /etc/secrets/hf", f"HF_TOKEN: [{VALUE}]")),
        edited(("{OMP_NUM_THREADS: 8}", f"HF_TOKEN={VALUE}")),
        edited(("{OMP_NUM_THREADS: 8}", f"[HF_TOKEN={VALUE}]")),
        edited(("{OMP_NUM_THREADS: 8}", f"{{HF_TOKEN: {{value: {VALUE}}}}}")),
        edited(("OMP_NUM_THREADS: 8", f"{TOKEN}: 8, {TOKEN}: 9")),
        edited(("OMP_NUM_THREADS: 8", f"'{TOKEN} x': 8")),
        edited(("OMP_NUM_THREADS: 8", f"DB_PASSWORD: &{VALUE}")),
        edited(("OMP_NUM_THREADS: 8", f"DB_PASSWORD: *{VALUE}")),
        edited(("OMP_NUM_THREADS: 8", f"DB_PASSWORD: !{VALUE} x")),
        edited(("OMP_NUM_THREADS: 8", f"DB_PASSWORD: @{VALUE}")),
        edited(("OMP_NUM_THREADS: 8", f'DB_PASSWORD: "{VALUE}')),
        edited(("mode: enforce", f"mode: {TOKEN}")),
        edited(("mode: enforce", f"{TOKEN}: enforce")),
        edited(("gpus: inference", f"gpus: inference\n      token: {VALUE}")),
    ],
)  # fmt: skip
def test_S13_no_error_of_any_sort_repeats_what_looks_like_a_secret(text):
    found = problems(text)
    assert found
    assert not any(VALUE in line or TOKEN in line for line in found), found


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "GITHUBTOKEN", "AWS_SECRET_ACCESS_KEY", "api-key", "MY_PASSWORD", "HF_TOKEN_2"]
)
def test_names_that_say_that_their_value_is_a_secret(name):
    assert secret_name(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN_PATH", "/etc/hf"),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ("EOS_TOKEN", "</s>"),
        ("max-total-tokens", 1000),
        ("speculative-token-map", "/models/map"),
        ("tokenizer-path", "/models/hf_quantizedmodel"),
        ("ssl-keyfile", "/etc/key.pem"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("model-path", "/models/sk-learn-something-long"),
    ],
)
def test_ordinary_settings_are_not_taken_for_secrets(name, value):
    assert not secret_setting(name, value)
