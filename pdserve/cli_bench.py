"""`pdserve bench ...`: names the benches and their options; each is a module of `bench` with `main(options) -> int`.

Owns the mapping from a command line to an options value; measures nothing. Invariant: every bench takes --json FILE,
--quick and --seed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

bench = typer.Typer(
    name="bench",
    help="Measure: kernels, links, engine speed, exactness, or a server under load.",
    epilog="Example: pdserve bench load --rate 4 --requests 100 --json out.json",
    no_args_is_help=True,
)

JsonFile = Annotated[str | None, typer.Option("--json", help="write the report to FILE, - for stdout", metavar="FILE")]
Quick = Annotated[bool, typer.Option("--quick", help="a short run")]
Seed = Annotated[int, typer.Option(help="of prompts and arrivals")]
BaseUrl = Annotated[str | None, typer.Option("--base-url", help="a running server (default: starts its own)")]
Model = Annotated[str, typer.Option(help="model to serve, or to ask at --base-url")]


def _run(module: str, options: Any) -> None:
    raise typer.Exit(int(importlib.import_module(module).main(options)))


@bench.command()
def engine(json: JsonFile = None, quick: Quick = False, seed: Seed = 0, model: Model = "smollm2-135m") -> None:
    """Speed of prefill, decode and hand-off, one core per worker, beside transformers in the same run.

    Example: pdserve bench engine --json engine.json
    """
    from bench.report import BenchOptions

    _run("bench.engine", BenchOptions(json=json, is_quick=quick, seed=seed, model=model))


@bench.command()
def kernels(json: JsonFile = None, quick: Quick = False, seed: Seed = 0) -> None:
    """Every kernel over a grid of shapes on one core, as shares of this machine's ceilings.

    Example: pdserve bench kernels --json kernels.json
    """
    from bench.report import BenchOptions

    _run("bench.kernels", BenchOptions(json=json, is_quick=quick, seed=seed))


@bench.command()
def transfer(json: JsonFile = None, quick: Quick = False, seed: Seed = 0) -> None:
    """How fast each link moves KV blocks between two processes, beside a bare copy of the same bytes.

    Example: pdserve bench transfer --json transfer.json
    """
    from bench.report import BenchOptions

    _run("bench.transfer", BenchOptions(json=json, is_quick=quick, seed=seed))


@bench.command()
def exactness(
    json: JsonFile = None,
    quick: Quick = False,
    seed: Seed = 0,
    base_url: BaseUrl = None,
    model: Model = "smollm2-135m",
    kernels: Annotated[str, typer.Option(help="kernel set of the servers it starts")] = "auto",
) -> None:
    """Compare served tokens with what transformers generates.

    Example: pdserve bench exactness --quick --json exactness.json
    """
    from bench.report import BenchOptions

    options = BenchOptions(json=json, is_quick=quick, seed=seed, base_url=base_url, model=model, kernels=kernels)
    _run("bench.exactness", options)


@bench.command()
def load(
    json: JsonFile = None,
    quick: Quick = False,
    seed: Seed = 0,
    base_url: BaseUrl = None,
    model: Model = "smollm2-135m",
    arrivals: Annotated[str, typer.Option(metavar="poisson|fixed|closed", help="when requests are sent")] = "poisson",
    rate: Annotated[float, typer.Option(help="requests per second, open loop")] = 2.0,
    concurrency: Annotated[int, typer.Option(help="requests in flight, closed loop")] = 8,
    requests: Annotated[int, typer.Option(help="how many to measure")] = 100,
    warmup: Annotated[int, typer.Option(help="requests before those, with other prompts")] = 2,
    prompt_tokens: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="prompt lengths, fixed or uniform")] = "128",
    output_tokens: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="output lengths")] = "64",
    goodput: Annotated[str, typer.Option(metavar="ttft:MS tpot:MS", help="targets; e2e:MS too")] = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="give a request up after this many seconds")] = 120.0,
    api_key_file: Annotated[Path | None, typer.Option(help="file with the API key")] = None,
    serve: Annotated[str, typer.Option(help="flags for the server it starts", metavar="'--decode 2 ...'")] = "",
) -> None:
    """Open-loop load; latency counts from when a request should have been sent.

    Example: pdserve bench load --rate 4 --requests 100 --goodput "ttft:1000 tpot:50" --json load.json
    """
    from bench.options import load_options
    from bench.report import BenchOptions
    from pdserve.options import read_api_keys

    options = load_options(
        bench=BenchOptions(json=json, is_quick=quick, seed=seed, base_url=base_url, model=model),
        arrivals=arrivals,
        rate_rps=rate,
        concurrency=concurrency,
        num_requests=requests,
        num_warmup=warmup,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        goodput=goodput,
        timeout_s=timeout_s,
        api_key=read_api_keys(str(api_key_file))[0] if api_key_file else None,
        serve_flags=serve,
    )
    _run("bench.load", options)
