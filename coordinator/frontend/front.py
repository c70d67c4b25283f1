"""What the routes of one front end share: the model's text side, the core, limits and counters.

Owns their construction and the way of a request body to the core's door. Invariant: at most `max_preparing` requests
are being tokenized or wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from coordinator.frontend.chat import load_chat_template
from coordinator.frontend.client import Connect, CoreClient, PoolLimit
from coordinator.frontend.envelope import ServiceError
from coordinator.frontend.metrics import FrontMetrics
from coordinator.frontend.prepare import Prepared, Preparer, seed_source
from coordinator.frontend.tokenizer import load_tokenizer
from coordinator.frontend.validate import Kind, Model, Parsed, parse
from pdserve.config import FrontConfig
from pdserve.errors import OverloadedError
from pdserve.messages import Submit
from pdserve.options import read_api_keys

log = logging.getLogger("pdserve.front")
_TENANT = re.compile(r"[A-Za-z0-9_.:@-]{1,64}")
_PREPARE_THREADS = 2


class Front:
    def __init__(self, config: FrontConfig, connect: Connect) -> None:
        """Raises ConfigError when there is no key in the file that should hold them."""
        http, folder = config.http, Path(config.model_dir)
        self.config = config
        self.api_keys = read_api_keys(http.api_key_file) if http.api_key_file else ()
        self.model = Model(
            served_names=config.served_names,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            max_model_len=config.max_model_len,
            max_choices=config.max_choices,
        )
        self.tokenizer = load_tokenizer(folder)
        self.template = load_chat_template(folder, self.tokenizer)
        self.client = CoreClient(connect, max_buffer_bytes=http.client_buffer_kb * 1024)
        self.metrics = FrontMetrics(config.name)
        self.is_leaving = False  # after SIGTERM
        self._preparer = Preparer(
            self.tokenizer, self.template, vocab_size=config.vocab_size, limit_s=config.render_timeout_s
        )
        self._limit = PoolLimit(self.client, max_age_s=config.limits_refresh_s, now_s=time.monotonic)
        self._draw_seed = seed_source(config.seed)
        self._threads = ThreadPoolExecutor(_PREPARE_THREADS, thread_name_prefix="prepare")
        self._num_preparing = 0

    def close(self) -> None:
        self.client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def parse(self, kind: Kind, body: dict[str, Any]) -> Parsed:
        if self.is_leaving:
            raise leaving()
        return parse(kind, body, self.model)

    async def prepare(self, parsed: Parsed) -> tuple[Prepared, ...]:
        """Token ids and sampling of each prompt; heavy work happens in a thread."""
        limit = self._limit.within(self.config.max_model_len)
        seed = self._draw_seed() if parsed.seed is None else parsed.seed
        if self._preparer.is_quick(parsed):
            prepared = self._preparer.prepare(parsed, limit=limit, seed=seed)
        else:
            prepared = await self.in_thread(lambda: self._preparer.prepare(parsed, limit=limit, seed=seed))
        if self.config.http.log_prompts:
            for item in prepared:
                log.info("prompt: %r", self.tokenizer.spell(list(item.prompt)))
        return prepared

    async def in_thread(self, work: Any) -> Any:
        if self._num_preparing >= self.config.max_preparing:
            raise OverloadedError("Too many requests are being tokenized", status=503, retry_after_s=1.0)
        self._num_preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_preparing -= 1

    def submits(self, parsed: Parsed, prepared: tuple[Prepared, ...], *, tenant: str, received_ns: int) -> list[Submit]:
        """One for each prompt; the client that sends them numbers the tickets."""
        return [
            Submit(
                ticket=0,
                prompt=item.prompt,
                sampling=item.sampling,
                stop=parsed.stop,
                priority=parsed.priority,
                tenant=tenant,
                salt=parsed.salt,
                received_ns=received_ns,
                timeout_s=self.config.timeouts.request_timeout_s,
            )
            for item in prepared
        ]


def tenant_of(value: bytes | None) -> str:
    """The budget a request counts against; anything but a plain name is the nameless one."""
    text = (value or b"").decode("latin-1")
    return text if _TENANT.fullmatch(text) else ""


def leaving() -> ServiceError:
    return ServiceError("The server is shutting down", status=503, code="shutting_down", retry_after_s=5.0)
