"""Flags, files, precedence, validation, and the way to a child process."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import EngineOptions, ServeConfig, TimeoutOptions, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.options import (
    device_list,
    flag_table,
    from_plain,
    host_and_port,
    is_loopback,
    memory_shares,
    read_api_keys,
    read_file,
    resolve,
    to_plain,
)

CONTRACT_DEFAULTS = {
    "host": "127.0.0.1", "port": 8000, "admin-port": 0, "ready-file": None, "dtype": "bfloat16", "block-size": None,
    "kv-memory-gb": None, "kv-blocks": None, "max-model-len": None, "chunk-tokens": 512, "max-batched-tokens": 2048,
    "max-running": 64, "max-queued-requests": 256, "max-queued-tokens": 262144, "max-body-mb": 8,
    "request-timeout": 600, "queue-timeout": 30, "handoff-wait": 10, "lease-ttl": 20, "heartbeat-timeout": 2,
    "hang-timeout": 10, "client-buffer-kb": 1024, "client-stall-timeout": 60, "landing-share": 0.25,
    "transfer-slice-ms": 2, "max-attempts": 3, "api-workers": 1, "log-prompts": False, "insecure": False,
    "api-key-file": None, "kv-link": "auto", "kernels": "auto", "seed": None, "disaggregate": "always",
    "on-empty-pool": "fail", "prefill": 1, "decode": 1, "model": "smollm2-135m", "gpu-memory-share":
    "prefill=0.4,decode=0.5",
}  # fmt: skip


def refusal(**flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve({name.replace("_", "-"): value for name, value in flags.items()})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "default"), CONTRACT_DEFAULTS.items())
def test_a_flag_of_the_contract_exists_with_its_default(name, default):
    row = next(row for row in flag_table() if row.name == name)
    assert row.default == default


def test_flag_names_are_unique_and_every_flag_says_what_it_is():
    names = [row.name for row in flag_table()]
    assert len(names) == len(set(names))
    assert all(row.help and row.shown for row in flag_table())


def test_a_flag_wins_over_the_file_and_the_file_over_the_default():
    config = resolve({"max-running": 3, "decode": None}, {"max-running": 2, "decode": 4})
    assert (config.engine.max_running, config.pools.decode, config.pools.prefill) == (3, 4, 1)


def test_a_seed_is_drawn_once_and_a_given_one_is_kept():
    assert resolve({}).core.seed is not None
    assert resolve({"seed": 0}).core.seed == 0


def test_a_file_holds_flags_by_their_names(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('max-running = 8\nlease-ttl = 5\nhost = "::1"\nlog-prompts = true\n')
    config = resolve({}, read_file(path))
    assert (config.engine.max_running, config.timeouts.lease_ttl_s, config.http.host) == (8, 5.0, "::1")
    assert config.http.log_prompts


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max-runing = 8", "unknown key 'max-runing'; the nearest is 'max-running'"),
        ("max_running = 8", "the nearest is 'max-running'"),
        ("max-running = true", "must be a whole number"),
        ("max-running = 8.0", "must be a whole number"),
        ("insecure = 1", "must be true or false"),
        ("lease-ttl = nan", "must be finite"),
        ("model = 7", "must be a string"),
        ("[engine]\nx = 1", "unknown key 'engine'"),
        ("max-running = ", "not TOML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_key(tmp_path, text, part):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        read_file(path)
    assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.toml")


def test_no_prefill_pool_contradicts_always_only_when_both_are_said():
    assert "--prefill 0 contradicts --disaggregate always" in refusal(prefill=0, disaggregate="always")
    assert resolve({"prefill": 0}).is_colocated
    assert resolve({"prefill": 0, "disaggregate": "auto"}).is_colocated


def test_always_said_in_the_file_contradicts_too():
    with pytest.raises(ConfigError, match="contradicts"):
        resolve({"prefill": 0}, {"disaggregate": "always"})


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_the_landing_share_is_above_zero_and_at_most_one(share):
    assert "--landing-share" in refusal(landing_share=share)


def test_the_whole_pool_may_be_for_landing():
    assert resolve({"landing-share": 1.0}).engine.landing_share == 1.0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "box.local", ""])
def test_serving_beyond_loopback_needs_keys_or_a_clear_word(host):
    assert "--api-key-file" in refusal(host=host)
    assert resolve({"host": host, "insecure": True}).http.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost", "[::1]"])
def test_loopback_needs_no_key(host):
    assert resolve({"host": host}).http.host == host


def test_a_key_file_opens_the_network(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n")
    assert resolve({"host": "0.0.0.0", "api-key-file": str(path)}).http.api_key_file == str(path)
    assert read_api_keys(str(path)) == ("one", "two")


def test_an_empty_or_missing_key_file_is_refused(tmp_path):
    (tmp_path / "keys").write_text("\n")
    assert "holds no key" in refusal(api_key_file=str(tmp_path / "keys"))
    assert "No such file" in refusal(api_key_file=str(tmp_path / "none"))


def test_the_control_address_stays_on_loopback_even_when_insecure():
    assert "is not loopback" in refusal(control="0.0.0.0:5600", insecure=True)
    assert "HOST:PORT" in refusal(control="5600")
    assert resolve({"control": "[::1]:5600"}).core.control == "[::1]:5600"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"kv_blocks": 64, "kv_memory_gb": 1.0}, "give one of them"),
        ({"chunk_tokens": 4096}, "more than --max-batched-tokens"),
        ({"hang_timeout": 1.0}, "below --heartbeat-timeout"),
        ({"block_size": 24}, "power of two"),
        ({"port": 70000}, "at most 65535"),
        ({"decode": 0}, "at least 1"),
        ({"kv_link": "rdma"}, "one of auto, shm, tcp"),
        ({"gpu_memory_share": "0.5"}, "prefill=0.4,decode=0.5"),
        ({"gpu_memory_share": "prefill=0.6,decode=0.5"}, "at most 1"),
        ({"devices": "gpu0"}, "not a device"),
        ({"request_timeout": float("inf")}, "must be finite"),
    ],
)
def test_a_wrong_value_says_what_would_be_right(flags, part):
    assert part in refusal(**flags)


def test_small_parsers():
    assert host_and_port("tcp://127.0.0.1:5600") == ("127.0.0.1", 5600)
    assert memory_shares("prefill=0.25, decode=0.75") == {"prefill": 0.25, "decode": 0.75}
    assert device_list("cpu:0, cuda:1") == ("cpu:0", "cuda:1")
    assert not is_loopback("example")


def test_a_config_survives_json():
    config = resolve({"prefill": 2, "max-model-len": 512, "api-workers": 2})
    assert from_plain(ServeConfig, json.loads(json.dumps(to_plain(config)))) == config


@given(cores=st.lists(st.integers(0, 500)))
def test_a_workers_config_survives_json(cores):
    config = WorkerConfig(
        role="decode", name="d0", device="cpu:1", cores=tuple(cores), coordinator="ipc:///x",
        engine=EngineOptions(kv_blocks=64), timeouts=TimeoutOptions(),
    )  # fmt: skip
    assert from_plain(WorkerConfig, json.loads(json.dumps(to_plain(config)))) == config


def test_a_plain_config_with_unknown_or_missing_keys_is_refused():
    plain = to_plain(TimeoutOptions())
    del plain["lease_ttl_s"]
    with pytest.raises(ConfigError, match=r"unknown keys \['more'\], missing keys \['lease_ttl_s'\]"):
        from_plain(TimeoutOptions, {**plain, "more": 1})


def test_the_readme_has_one_table_with_every_flag():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    for row in flag_table():
        about = row.help + (f": {', '.join(row.choices)}" if row.choices else "")
        assert f"| `--{row.name}` | {row.shown} | {about} | {row.limit} |" in text
