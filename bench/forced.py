"""The bfloat16 part of exactness: reference tokens forced through the real hand-off, log-probabilities compared.

Owns which questions force what, and the rival's own rounding as the yardstick; `judging` owns the verdict. A request's
first token is forced by a bias, so its log-probabilities come from the prefill worker, and those of the second from
the decode worker over the KV that was handed to it. Invariant: every position is seen from both sides but the first
and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.arms import Answer, Arm, Ask
from bench.judging import Branch, Place, branch, place
from bench.references import Reference
from coordinator.frontend.logprobs import spelled
from coordinator.frontend.tokenizer import load_tokenizer
from pdserve.errors import PDServeError

NUM_LOGPROBS = 5  # the most that completions report


def forced_asks(reference: Reference, salt: str) -> list[Ask]:
    """One per pair of neighbouring positions: the prompt and the tokens before it, two tokens wanted."""
    return [
        Ask(
            prompt=[*reference.prompt, *reference.tokens[:step]],
            num_new=2,
            forced=token,
            num_logprobs=NUM_LOGPROBS,
            salt=salt,
        )
        for step, token in enumerate(reference.tokens[:-1])
    ]


def forced_places(
    arm: Arm, directory: Path, chosen: Sequence[Reference], salt: str, group: int
) -> tuple[list[Place], list[Place]]:
    """(as the prefill worker saw them, as the decode worker did); raises PDServeError when a request fails."""
    table = load_tokenizer(directory).table
    sides: tuple[list[Place], list[Place]] = ([], [])
    for reference in chosen:
        spell = {token: spelled(token, table) for row in reference.top_ids for token in row}
        asks = forced_asks(reference, salt)
        answers = [each for at in range(0, len(asks), group) for each in arm.complete(asks[at : at + group])]
        for step, reply in enumerate(answers):
            _require(reply, reference, step)
            for offset, side in enumerate(sides):
                side.append(place(reference, step + offset, reply.top[offset], spell))
    return sides


def _require(reply: Answer, reference: Reference, step: int) -> None:
    if reply.error:
        raise PDServeError(f"a forced request failed: {reply.error}")
    if len(reply.tokens) != 2 or len(reply.top) != 2 or reply.tokens[0] != reference.tokens[step]:
        raise PDServeError(f"token {reference.tokens[step]} was forced at step {step}, served was {reply.tokens}")


def free_branches(arm: Arm, chosen: Sequence[Reference], salt: str, near: float) -> list[Branch]:
    """Greedy text left alone, over KV that the decode worker wrote; closer than `near` excuses a branch."""
    replies = arm.complete([Ask(prompt=each.prompt, num_new=len(each.tokens), salt=salt) for each in chosen])
    found = [branch(reference, reply.tokens, near=near) for reference, reply in zip(chosen, replies, strict=True)]
    return [each for each in found if each is not None]


def rival_difference(directory: Path, chosen: Sequence[Reference], say: Callable[[str], None]) -> float:
    """The largest difference that transformers' own bfloat16 shows at the same places, over the same likeliest few."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    largest = 0.0
    for done, reference in enumerate(chosen):
        say(f"transformers in bfloat16: {done} of {len(chosen)}")
        ids = torch.tensor([[*reference.prompt, *reference.tokens[:-1]]])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(reference.prompt) - 1 :].float()
        wanted = torch.tensor(reference.top_ids)[:, :NUM_LOGPROBS]
        exact = torch.tensor(reference.top_logprobs)[:, :NUM_LOGPROBS]
        difference = (logits.log_softmax(dim=-1).gather(1, wanted) - exact).abs().max()
        largest = max(largest, float(difference))
    return largest
