"""The GPU check's own code, in a dry run: what it builds, how it judges, and what it makes of sections that break."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from kernel_kit import Case as Plain
from kernel_kit import naive

from bench.gpu import decode, environment, layer, prefill
from bench.gpu.cases import Case, build, expected, judge
from bench.gpu.models import DRY_SHAPES, SHAPES, decode_bytes, linear_params, prefill_flops, spec_of
from bench.gpu.section import Setting, Sink, found
from bench.gpu.served import _says_why
from bench.gpu.speed import decode_bytes as attention_bytes
from bench.gpu.speed import prefill_flops as attention_flops
from pd_kernels.triton.arguments import INTERPRETED
from pd_kernels.triton.decode import TritonDecode

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu_check.py"
SMALL = Case(
    name="small", contexts=(40, 1, 33), kv_heads=2, group=2, dim=16, block_size=16, dtype=torch.float32, num_blocks=20
)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a dry run is on the CPU")


@pytest.fixture
def sink(tmp_path):
    return Sink(tmp_path / "lines")


def dry(left_s=60.0, **fields):
    return Setting(is_dry=True, deadline_s=time.monotonic() + left_s, **fields)


def checks(tmp_path):
    return found(tmp_path / "lines")[1]


def test_used_rows_are_numbers_and_everything_else_is_nan_or_garbage():
    built = build(SMALL, "cpu", 0)
    assert built.kv.shape == (20, 2, 2, 16, 16)
    assert int((~built.kv.isnan()).sum()) == (40 + 1 + 33) * 2 * 2 * 16
    assert (built.tables < 20).sum(1).tolist() == [3, 1, 3]
    assert (built.tables[built.tables < 20] == 19).any(), "the last block of a large pool is used"
    assert built.tables[1, 1:].tolist() == [2**31 - 1] * 4


@pytest.mark.parametrize("queries", [(), (5, 1, 0)])
def test_what_must_come_out_is_attention_by_its_definition(queries):
    case = Case(**{**vars(SMALL), "queries": queries})
    built = build(case, "cpu", 0)
    plain = Plain(contexts=[40, 1, 33], queries=list(case.rows), kv_heads=2, group=2, dim=16)
    rows, wanted = expected(case, built)
    assert rows.tolist() == list(range(sum(case.rows)))
    torch.testing.assert_close(wanted, naive(plain, built.q, built.kv, built.tables))


def test_of_many_rows_some_are_compared_the_first_and_the_last_among_them():
    case = Case(**{**vars(SMALL), "contexts": (40,), "queries": (40,), "most_rows": 5})
    rows, wanted = expected(case, build(case, "cpu", 0))
    assert rows.tolist() == [0, 10, 20, 29, 39]
    assert wanted.shape == (5, 4, 16)


def test_a_result_within_tolerance_is_ok_and_nan_or_another_shape_is_not(sink, tmp_path):
    exact = torch.ones(3, dtype=torch.float64)
    judge(sink, "near", exact + 1e-6, exact, 1e-6)
    judge(sink, "far", exact + 3e-6, exact, 1e-6)
    judge(sink, "nan", torch.tensor([1.0, 1.0, float("nan")]), exact, 1e-6)
    judge(sink, "shape", exact[:2], exact, 1e-6)
    assert [check.is_ok for check in checks(tmp_path)] == [True, False, False, False]
    assert "the first at (2,)" in checks(tmp_path)[2].reason


@interpreted
def test_a_kernel_that_reads_a_wrong_block_is_found_out(sink, tmp_path):
    built = build(SMALL, "cpu", 0)
    rows, wanted = expected(SMALL, built)
    judge(sink, "right", decode.apply(TritonDecode(), SMALL, built)[rows], wanted, 2e-5)
    built.tables[0, [0, 1]] = built.tables[0, [1, 2]]
    judge(sink, "wrong", decode.apply(TritonDecode(), SMALL, built)[rows], wanted, 2e-5)
    assert [check.is_ok for check in checks(tmp_path)] == [True, False]


def test_what_raises_or_has_no_time_left_is_not_ok_and_the_next_piece_runs(sink, tmp_path):
    def fail():
        raise ValueError("no such shape\nmore")

    sink.attempt("raises", dry(), fail)
    sink.attempt("is late", dry(left_s=0), lambda: sink.row("never", 1, "x"))
    sink.attempt("rival", dry(), fail, is_needed=False)
    sink.attempt("works", dry(), lambda: sink.holds("works", True))
    rows, ended = found(tmp_path / "lines")
    assert [(check.name, check.is_ok) for check in ended] == [("raises", False), ("is late", None), ("works", True)]
    assert ended[0].reason == "ValueError: no such shape"
    assert [(row.name, row.parameters["why"]) for row in rows] == [("rival", "ValueError: no such shape")]


def test_a_last_line_that_was_cut_short_is_dropped(sink, tmp_path):
    sink.row("whole", 1.5, "ms", ceiling=3.0, batch=2)
    with (tmp_path / "lines").open("a") as file:
        file.write('{"row": {"na')
    [row], none = found(tmp_path / "lines")
    assert (row.plain()["share_of_ceiling"], row.parameters, none) == (0.5, {"batch": 2}, [])
    assert found(tmp_path / "nothing") == ([], [])


def test_costs_are_those_counted_by_hand():
    case = Case(name="", contexts=(3, 4), queries=(3, 1), kv_heads=2, group=2, dim=16)
    assert attention_flops(case) == 4 * (6 + 4) * 4 * 16
    assert attention_bytes(case) == 7 * 2 * 2 * 16 * 2
    spec = spec_of("tiny", DRY_SHAPES["tiny"])
    params = 2 * (32 * 128 + 64 * 32 + 3 * 32 * 48)
    assert linear_params(spec) == params
    assert prefill_flops(spec, 3) == 2 * 3 * params + 4 * 6 * 64 * 2 + 2 * 101 * 32
    assert decode_bytes(spec, 2, 5, 2) == 2 * (params + 101 * 32 + 2 * 5 * 2 * 2 * 16 * 2)


def test_the_8b_shape_has_the_weights_of_llama_3_8b():
    spec = spec_of("8B", SHAPES["8B"])
    assert linear_params(spec) + 2 * 128_256 * 4096 + 65 * 4096 == 8_030_261_248


def test_only_an_error_that_the_server_tells_is_a_clean_end():
    assert _says_why("{'message': 'no decode worker is ready'}")
    assert _says_why("503: {'message': 'no decode worker is ready'}")
    assert not _says_why("IncompleteReadError: 0 bytes read")
    assert not _says_why("no end after 60 s")
    assert not _says_why("")


@interpreted
@pytest.mark.parametrize("section", [environment, layer, prefill], ids=lambda module: module.__name__)
def test_a_section_runs_dry_and_all_its_checks_are_ok(section, sink, tmp_path):
    section.run(dry(), sink)
    rows, ended = found(tmp_path / "lines")
    assert [check for check in ended if not check.is_ok] == []
    assert rows or ended


def script(*arguments, cwd):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env={}, check=False)


def test_the_script_runs_from_anywhere_and_writes_a_report(tmp_path):
    done = script("--dry", "--only", "environment", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    names = [row["name"] for row in report["rows"]]
    assert names == ["gpu", "ceiling_read", "ceiling_copy", "ceiling_gemm", "section_seconds"]
    assert report["checks"] == []


def test_a_section_past_its_time_is_killed_and_the_report_says_so(tmp_path):
    limits = ("--budget-s", "0.5", "--grace-s", "0")
    done = script("--dry", "--only", "environment", "--json", "out.json", *limits, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    [check] = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert (check["name"], check["ok"]) == ("section_environment", False)
    assert check["reason"].startswith("stopped after 1 s")


def test_a_section_that_is_not_there_is_refused(tmp_path):
    done = script("--only", "environment,kernel", cwd=tmp_path)
    assert done.returncode == 2
    assert "no such section: kernel" in done.stderr
