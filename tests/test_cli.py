"""The command line: what it refuses, in which words and with which exit status; and its clients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_http import fake_http

from pdserve import __version__
from pdserve.cli import run, worker_config
from pdserve.cli_chat import Answer, deltas, phase_line
from pdserve.cli_operate import pools_text, wait_for_sizes, wanted_sizes
from pdserve.config import ServeConfig
from pdserve.errors import ConfigError, PDServeError
from pdserve.options import flag_table
from pdserve.runtime import RuntimeRecord, started_ticks, write_record

ROOT = Path(__file__).parents[1]
COMMANDS = ("up", "coordinator", "worker", "chat", "pools", "scale", "doctor", "bench load", "bench engine")


def refusal(capsys, *arguments):
    status = run(arguments)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("pdserve: ")
    assert err.count("\n") == 1
    return err


def test_the_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"pdserve {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys, command):
    assert run([*command.split(), "--help"]) == 0
    assert f"Example: pdserve {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["up", "coordinator", "worker"])
def test_every_serving_command_knows_every_flag(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert [row.name for row in flag_table() if f"--{row.name} " not in out] == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["up", "--prefil", "1"], "--prefill"),
        (["up", "--port", "abc"], "valid integer"),
        (["up", "--port", "70000"], "at most 65535"),
        (["up", "--decode", "0"], "--decode is 0; it must be at least 1"),
        (["up", "--prefill", "0", "--disaggregate", "always"], "contradicts"),
        (["up", "--host", "0.0.0.0"], "--insecure"),
        (["up", "--dtype", "int4"], "bfloat16, float16, float32"),
        (["up", "--config", "/nonexistent.toml"], "No such file"),
        (["coordinator", "--control", "0.0.0.0:1"], "not loopback"),
        (["worker", "--role", "both", "--coordinator", "tcp://127.0.0.1:1"], "prefill, decode"),
        (["worker", "--role", "prefill", "--coordinator", "127.0.0.1"], "HOST:PORT"),
        (["worker", "--role", "prefill"], "--coordinator"),
        (["worker", "--role", "prefill", "--coordinator", "tcp://10.0.0.1:5"], "not loopback"),
        (["worker", "--role", "decode", "--coordinator", "tcp://127.0.0.1:1", "--device", "gpu"], "not a device"),
        (["scale", "prefill"], "prefill=2 decode=3"),
        (["pools", "--admin", "http://127.0.0.1:1"], "go together"),
        (["serve"], "No such command 'serve'"),
        (["bench", "load", "--goodput", "ttft"], "ttft:1000 tpot:50"),
        (["bench", "load", "--arrivals", "bursty"], "poisson, fixed, closed"),
        (["bench", "load", "--prompt-tokens", "0"], "64:512"),
        (["bench", "load", "--rate", "0"], "--rate"),
        (["bench", "load", "--base-url", "https://127.0.0.1"], "http://127.0.0.1:8000"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_status_2(capsys, arguments, part):
    assert part in refusal(capsys, *arguments)


def test_help_needs_neither_torch_nor_the_servers_libraries():
    code = (
        "import sys\nfrom pdserve.cli import run\nassert run(['up', '--help']) == 0\n"
        "heavy = [n for n in ('torch', 'transformers', 'fastapi', 'httpx', 'zmq', 'numpy') if n in sys.modules]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_worker_started_by_hand_is_told_its_share_of_the_machine():
    config = worker_config(
        ServeConfig(), role="decode", coordinator="tcp://127.0.0.1:5600", device="cpu:0", name="mine"
    )
    assert (config.role, config.name, config.device) == ("decode", "mine", "cpu:0")
    assert config.cores
    assert config.coordinator == "tcp://127.0.0.1:5600"


# pools and scale


def state(prefill, desired=None):
    pool = {"actual": prefill, "desired": desired or prefill, "workers": [{"name": "p0", "state": "ready"}]}
    return {"prefill": pool, "decode": {"actual": 1, "desired": 1, "workers": []}}


def test_sizes_are_read_from_words():
    assert wanted_sizes(["prefill=2", "decode=3"]) == {"prefill": 2, "decode": 3}
    for wrong in (["prefill"], ["other=1"], ["prefill=-1"], ["prefill=1", "prefill=2"]):
        with pytest.raises(ConfigError, match="prefill=2 decode=3"):
            wanted_sizes(wrong)


def test_pools_are_shown_with_their_workers_in_columns():
    assert pools_text(state(1, 2)).splitlines() == [
        "prefill: 1 of 2",
        "  name  state",
        "  p0    ready",
        "decode: 1 of 1",
    ]


def test_scaling_waits_until_the_pool_has_its_size():
    answers = iter([state(1, 2), state(1, 2), state(2)])
    said = []
    done = wait_for_sizes(lambda: next(answers), {"prefill": 2}, 5.0, said.append, lambda: 0.0, lambda _: None)
    assert done == state(2)
    assert said == ["prefill 1 of 2", "prefill 1 of 2"]


def test_scaling_gives_up_in_the_end_and_says_how_far_it_came():
    clock = iter([0.0, 1.0, 6.0])
    with pytest.raises(PDServeError, match="not done after 5 s: prefill 1 of 2"):
        wait_for_sizes(lambda: state(1, 2), {"prefill": 2}, 5.0, lambda _: None, lambda: next(clock), lambda _: None)


def test_scaling_notices_that_somebody_else_scales():
    with pytest.raises(PDServeError, match="somebody else"):
        wait_for_sizes(lambda: state(1, 3), {"prefill": 2}, 5.0, lambda _: None, lambda: 0.0, lambda _: None)


def test_scale_asks_the_only_server_here_with_its_key(capsys, monkeypatch, tmp_path):
    asked = []

    def answer(method, path, headers, body):
        asked.append((method, path, headers["Authorization"], body))
        return 200, state(2)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with fake_http(answer) as url:
        me = RuntimeRecord(
            base_url="http://x", admin_url=url, admin_key="secret", pid=os.getpid(),
            started_ticks=started_ticks(os.getpid()),
        )  # fmt: skip
        write_record(tmp_path / "pdserve", 8000, me)
        assert run(["scale", "prefill=2"]) == 0
    assert asked[0] == ("PUT", "/admin/pools/prefill", "Bearer secret", {"replicas": 2})
    assert "prefill: 2 of 2" in capsys.readouterr().out


def test_without_a_server_pools_says_how_to_start_one(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert "pdserve up" in refusal(capsys, "pools")


def test_json_on_standard_output_stays_alone(capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("k\n")
    with fake_http(lambda *_: (200, state(1))) as url:
        assert run(["pools", "--admin", url, "--admin-key-file", str(key), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("{")
    assert out.endswith("}\n")
    assert err == ""


def test_a_servers_refusal_is_passed_on_in_its_words(capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("k\n")
    with fake_http(lambda *_: (409, {"error": {"message": "the last worker"}})) as url:
        assert run(["scale", "decode=0", "--admin", url, "--admin-key-file", str(key)]) == 2
    assert capsys.readouterr().err == "pdserve: the server refuses (409): the last worker\n"


# chat

EVENTS = [
    'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
    ": ping",
    'data: {"choices": [{"delta": {"content": "Hi"}}]}',
    'data: {"choices": [{"delta": {"content": " you"}, "finish_reason": "stop"}]}',
    'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}, "pdserve": {"mode": "disaggregated", '
    '"prefill_worker": "p0", "decode_worker": "d0", "cached_tokens": 0, "phases_ms": {"prefill": 12.34, "lost": 0.0}}}',
    "data: [DONE]",
]


def test_the_text_of_a_stream_comes_piece_by_piece_and_its_phases_at_the_end():
    answer = Answer()
    assert list(deltas(EVENTS, answer)) == ["Hi", " you"]
    assert phase_line(answer) == "disaggregated | p0 -> d0 | 9 prompt tokens, 0 cached | 2 tokens | prefill 12.3 ms"


def test_a_stream_that_breaks_off_or_reports_an_error_is_an_error():
    with pytest.raises(PDServeError, match="ended before"):
        list(deltas(EVENTS[:3], Answer()))
    with pytest.raises(PDServeError, match="no decode worker"):
        list(deltas([*EVENTS[:3], 'data: {"error": {"message": "no decode worker"}}'], Answer()))


def test_chat_prints_the_answer_and_asks_for_phases(capsys):
    asked = []

    def answer(method, path, headers, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "smol"}]}
        asked.append(body)
        return 200, "\n\n".join(EVENTS) + "\n\n"

    with fake_http(answer) as url:
        assert run(["chat", "Hello", "--base-url", url, "--max-tokens", "7"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hi you\n"
    assert "p0 -> d0" in err
    assert asked[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert (asked[0]["model"], asked[0]["max_tokens"], asked[0]["include_phases"]) == ("smol", 7, True)


def test_chat_with_nobody_is_one_line(capsys):
    assert run(["chat", "Hello", "--base-url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
