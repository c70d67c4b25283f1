"""Everything one front end process is told, resolved once; reads nothing.

Owns the configuration's checks, not the flags' spelling. Invariant: a config that passed `check` can be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.options import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    model_dir: Path  # holds tokenizer.json and the chat template
    served_names: tuple[str, ...]  # the first is the default
    vocab_size: int  # rows of the embedding
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens, prompt and output together
    name: str = "front-0"
    host: str = "127.0.0.1"
    port: int = 8000  # 0 picks one
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    is_insecure: bool = False  # a bind beyond loopback without keys was asked for in so many words
    cors_origins: tuple[str, ...] = ()
    max_body_mb: float = 8.0
    weights: Mapping[str, str] = field(default_factory=dict)  # precision in each pool
    max_choices: int = 256  # of one request; more could never wait together
    max_preparing: int = 256  # requests being rendered and tokenized at once
    request_timeout_s: float = 600.0
    client_buffer_kb: int = 1024
    client_stall_timeout_s: float = 60.0
    ping_interval_s: float = 10.0
    connect_patience_s: float = 2.0  # for a scheduler that is being replaced, before a request is refused
    ready_timeout_s: float = 2.0
    render_timeout_s: float = 2.0
    shutdown_timeout_s: float = 30.0  # running requests get this long after SIGTERM
    limits_refresh_s: float = 10.0  # how old the core's word on its pools may be
    seed: int | None = None  # of the seeds drawn for requests without one; None: unpredictable
    does_log_prompts: bool = False

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1024 * 1024)

    @property
    def client_buffer_bytes(self) -> int:
        return self.client_buffer_kb * 1024

    def check(self) -> None:
        """Raises ConfigError for what cannot or must not be served."""
        if not self.served_names or not all(self.served_names):
            raise ConfigError("the served model needs a name: pass --served-model-name NAME")
        if self.max_model_len < 2 or self.vocab_size < 1:
            raise ConfigError(f"--max-model-len {self.max_model_len} leaves no room for a prompt and a token")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not between 0 and 65535")
        if not is_loopback(self.host) and not self.api_keys and not self.is_insecure:
            raise ConfigError(f"--host {self.host} is open to others: give --api-key-file FILE, or say --insecure")
        for name in ("max_body_mb", "request_timeout_s", "client_buffer_kb", "client_stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
