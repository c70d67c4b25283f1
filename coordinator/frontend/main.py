"""A front end's process: from what the supervisor says to what the HTTP server needs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.corelink import AsyncCoreLink
from coordinator.frontend import server
from coordinator.frontend.config import FrontConfig
from pdserve import config as shared
from pdserve.messages import FrontHello
from pdserve.model.spec import read_spec
from pdserve.options import from_plain, read_api_keys


def main(plain: Mapping[str, Any]) -> int:
    told = from_plain(shared.FrontConfig, plain)

    def connect(on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> AsyncCoreLink:
        return AsyncCoreLink(
            told.core_endpoint, hello=FrontHello(name=told.name), on_message=on_message, on_lost=on_lost
        )

    return server.run(front_config(told), connect, socket.socket(fileno=told.listen_fd))


def front_config(told: shared.FrontConfig) -> FrontConfig:
    http, spec = told.http, read_spec(Path(told.model_dir))
    return FrontConfig(
        model_dir=Path(told.model_dir),
        served_names=(told.model_name,),
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=told.max_model_len,
        name=told.name,
        host=http.host,
        port=http.port,
        api_keys=read_api_keys(http.api_key_file) if http.api_key_file else (),
        is_insecure=http.insecure,
        cors_origins=(http.cors_origin,) if http.cors_origin else (),
        max_choices=told.max_choices,
        max_body_mb=http.max_body_mb,
        request_timeout_s=told.timeouts.request_timeout_s,
        client_buffer_kb=http.client_buffer_kb,
        client_stall_timeout_s=http.client_stall_timeout_s,
        shutdown_timeout_s=told.drain_s,
        seed=told.seed,
        does_log_prompts=http.log_prompts,
    )
