"""The load client: schedules, what counts as a miss, and honesty against a server that computes nothing."""

import asyncio
import dataclasses
import json
import random

import pytest
from null_server import Behaviour, null_server

from bench.load import measure
from bench.options import LoadOptions, Span, load_options, span, targets
from bench.report import BenchOptions, Check, Report, Row, at_most
from bench.stream_client import Exchange, server
from bench.summary import Sample, in_flight, percentile, summarize
from bench.workload import offsets, plan
from pdserve.cli import run
from pdserve.errors import ConfigError

QUICK = LoadOptions(
    bench=BenchOptions(seed=1), arrivals="fixed", rate_rps=200, num_requests=12, num_warmup=1,
    timeout_s=20, too_late_s=20, prompt_tokens=Span(low=8, high=8), output_tokens=Span(low=5, high=5),
)  # fmt: skip


def measured(options=QUICK, **behaviour):
    async def go():
        async with null_server(Behaviour(**behaviour)) as url:
            return await measure(options, server(url, None), "null", lambda _: None)

    return asyncio.run(go())


def values(samples, targets_ms=None):
    rows, checks = summarize(samples, targets_ms or {})
    named = {(row.name, row.parameters.get("statistic")): row.value for row in rows}
    return named, {check.name: check.is_ok for check in checks}


def exchange(due_s=0.0, *, first_s=0.1, num_output=3, gap_s=0.05, outcome="ok"):
    texts = [first_s + gap_s * index for index in range(num_output)]
    return Exchange(
        sent_s=due_s, ended_s=texts[-1] if texts else first_s, texts_s=texts, outcome=outcome, num_prompt=10,
        num_output=num_output,
    )  # fmt: skip


# schedules and prompts


def test_fixed_arrivals_have_equal_gaps():
    assert offsets("fixed", 4.0, 3, random.Random(0)) == [0.0, 0.25, 0.5]


def test_poisson_arrivals_have_the_asked_rate_and_are_seeded():
    due = offsets("poisson", 10.0, 4000, random.Random(0))
    assert due == offsets("poisson", 10.0, 4000, random.Random(0))
    assert due[-1] == pytest.approx(400, rel=0.1)
    assert due == sorted(due)


def test_a_closed_loop_has_no_schedule():
    assert offsets("closed", 1.0, 2, random.Random(0)) == [None, None]


def test_the_same_seed_plans_the_same_requests_and_another_one_others():
    other = dataclasses.replace(QUICK, bench=BenchOptions(seed=2))
    assert plan(QUICK, "m") == plan(QUICK, "m")
    assert plan(QUICK, "m")[1][0].body != plan(other, "m")[1][0].body


def test_no_prompt_is_sent_twice_not_even_by_the_warm_up():
    warmup, requests = plan(QUICK, "m")
    prompts = [tuple(json.loads(request.body)["prompt"]) for request in warmup + requests]
    assert len(set(prompts)) == len(prompts) == 13


def test_lengths_are_fixed_or_uniform():
    assert span("128", "x") == Span(low=128, high=128)
    drawn = {Span(low=2, high=4).draw(random.Random(seed)) for seed in range(50)}
    assert drawn == {2, 3, 4}
    with pytest.raises(ConfigError, match="64:512"):
        span("9:3", "--prompt-tokens")


def test_targets_are_read_from_words():
    assert targets("ttft:1000 tpot:50") == {"ttft": 1000.0, "tpot": 50.0}
    assert targets("") == {}
    for wrong in ("ttft", "ttft:x", "speed:1", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            targets(wrong)


def test_a_quick_run_is_a_short_one():
    options = load_options(
        bench=BenchOptions(is_quick=True), prompt_tokens="8", output_tokens="4", goodput="", serve_flags="",
        num_requests=1000,
    )  # fmt: skip
    assert options.num_requests == 30


# definitions


def test_latency_counts_from_when_the_request_was_due():
    late = dataclasses.replace(exchange(first_s=2.1), sent_s=2.0)
    found = Sample(due_s=0.0, num_output=3, exchange=late).latencies_ms
    assert found["ttft"] == pytest.approx(2100)
    assert found["e2e"] == pytest.approx(2200)
    assert found["tpot"] == pytest.approx(50)


def test_tpot_divides_by_tokens_not_by_pieces():
    pieces = Exchange(sent_s=0, ended_s=1.0, texts_s=[0.2, 1.0], outcome="ok", num_prompt=1, num_output=9)
    assert Sample(due_s=0.0, num_output=9, exchange=pieces).latencies_ms["tpot"] == pytest.approx(100)


def test_one_token_has_no_tpot_and_cannot_miss_it():
    sample = Sample(due_s=0.0, num_output=1, exchange=exchange(num_output=1))
    assert "tpot" not in sample.latencies_ms
    assert sample.meets({"tpot": 0.001, "ttft": 200})


def test_fewer_tokens_than_asked_for_is_a_truncation():
    assert Sample(due_s=0.0, num_output=4, exchange=exchange(num_output=3)).outcome == "truncated"


def test_goodput_counts_over_all_offered_requests():
    good = Sample(due_s=0.0, num_output=3, exchange=exchange())
    slow = Sample(due_s=0.0, num_output=3, exchange=exchange(first_s=3.9))
    refused = Sample(due_s=0.0, num_output=3, exchange=exchange(num_output=0, outcome="refused"))
    unsent = Sample(due_s=0.0, num_output=3, exchange=None)
    named, ok = values([good, slow, refused, unsent], {"ttft": 1000})
    assert named["goodput_share", None] == 0.25
    assert named["goodput", None] == pytest.approx(1 / 4)
    assert (named["refused", None], named["unsent", None]) == (1, 1)
    assert ok["requests the client could not send in time"] is False


def test_a_percentile_comes_with_the_interval_of_its_rank():
    assert percentile(list(range(1, 101)), 50.0) == (50, 41, 60)
    assert percentile([7.0], 99.0) == (7.0, 7.0, 7.0)


def test_requests_in_flight_count_from_when_they_were_due():
    samples = [Sample(due_s=float(at), num_output=3, exchange=exchange(first_s=at + 1.9)) for at in range(3)]
    most, mean = in_flight(samples)
    assert most == 2
    assert mean == pytest.approx(6 / 4)


def test_a_run_with_no_answer_is_not_ok():
    _, ok = values([Sample(due_s=0.0, num_output=3, exchange=exchange(num_output=0, outcome="failed"))])
    assert ok["requests that ended well"] is False


# the report


def test_a_check_that_could_not_run_counts_as_not_ok():
    report = Report(options=BenchOptions(), checks=[at_most("a", 1, 2, "ms")])
    assert report.status == 0
    report.checks.append(Check(name="b", value=None, bound="<= 1", is_ok=None, reason="no GPU"))
    assert report.status == 1
    assert report.plain()["checks"][1] == {"name": "b", "value": None, "bound": "<= 1", "ok": None, "reason": "no GPU"}


def test_a_row_carries_its_parameters_and_its_share_of_the_ceiling():
    row = Row(name="read", value=5.0, unit="GB/s", parameters={"batch": 8}, ceiling=20.0)
    assert row.plain() == {
        "name": "read", "batch": 8, "value": 5.0, "unit": "GB/s", "ceiling": 20.0, "share_of_ceiling": 0.25
    }  # fmt: skip


def test_the_report_is_json_even_with_infinite_values():
    report = Report(options=BenchOptions(seed=3), rows=[Row(name="x", value=float("inf"), unit="s")])
    plain = json.loads(json.dumps(report.plain(), allow_nan=False))
    assert plain["rows"][0]["value"] is None
    assert set(plain) == {"command", "versions", "machine", "seed", "rows", "checks"}


# against a server that computes nothing


def test_every_request_is_measured_with_usage_and_cache_hits():
    named, ok = values(measured())
    assert named["ok", None] == 12
    assert named["cache_hit_rate", None] == 0.5
    assert ok["requests that ended well"]


def test_a_server_that_can_do_one_at_a_time_does_not_slow_the_schedule():
    options = dataclasses.replace(QUICK, num_requests=6, rate_rps=100, output_tokens=Span(low=1, high=1))
    samples = measured(options, first_s=0.05, num_parallel=1)
    waited = [sample.latencies_ms["ttft"] for sample in samples]
    assert max(waited) > 200  # the sixth waits for five others, each at least 50 ms, less 50 ms of schedule


def test_each_way_of_failing_is_shown_and_none_is_left_out():
    named, _ = values(measured(pattern=("ok", "busy", "broken", "drop", "error", "ok")), {"ttft": 60_000})
    counts = {name: named[name, None] for name in ("ok", "refused", "failed", "truncated")}
    assert sum(counts.values()) == named["offered", None] == 12
    assert counts == {"ok": 4, "refused": 2, "failed": 4, "truncated": 2}
    assert named["goodput_share", None] == pytest.approx(4 / 12)


def test_a_closed_loop_keeps_so_many_in_flight():
    options = dataclasses.replace(QUICK, arrivals="closed", concurrency=3)
    named, _ = values(measured(options, first_s=0.01))
    assert named["max_in_flight", None] == 3
    assert named["ok", None] == 12


def test_a_request_that_never_ends_is_given_up():
    options = dataclasses.replace(QUICK, num_requests=1, num_warmup=0, timeout_s=0.05)
    (sample,) = measured(options, first_s=30)
    assert (sample.outcome, sample.exchange.detail) == ("failed", "no end after 0.05 s")


def test_nobody_there_is_a_failure_not_a_crash():
    samples = asyncio.run(measure(QUICK, server("http://127.0.0.1:9", None), "null", lambda _: None))
    assert {sample.outcome for sample in samples} == {"failed"}


def test_a_server_is_named_by_plain_http():
    found = server("http://[::1]:81/prefix/v1/", None)
    assert (found.host, found.port, found.path) == ("::1", 81, "/prefix")


def test_the_command_measures_a_named_server_and_writes_its_report(capsys, tmp_path):
    async def go():
        async with null_server(Behaviour()) as url:
            words = ["bench", "load", "--base-url", url, "--requests", "5", "--rate", "100", "--output-tokens", "4"]
            return await asyncio.to_thread(run, [*words, "--json", str(tmp_path / "f"), "--goodput", "ttft:60000"])

    assert asyncio.run(go()) == 0
    plain = json.loads((tmp_path / "f").read_text())
    assert {"name": "ok", "value": 5, "unit": "requests", "ceiling": None, "share_of_ceiling": None} in plain["rows"]
    assert "goodput_share" in capsys.readouterr().out
