import json

import pytest
from model_kit import save_tiny
from system_kit import Server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Llama with a byte-level tokenizer, so that every text can be sent and every id can be shown."""
    folder = save_tiny("llama3", tmp_path_factory.mktemp("model") / "tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(["<s>", "</s>", "<pad>", *alphabet][:199])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=False, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    settings = {"eos_token": "</s>", "chat_template": template, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """One prefill and one decode worker, shared by a module; nothing may be left when the module ends."""
    server = Server(tmp_path_factory.mktemp("server"), tiny_model)
    yield server
    server.expect_clean()
    assert server.stop() == 0


@pytest.fixture
def start(tiny_model, tmp_path):
    """Servers of one test, with flags; ended at its end."""
    started = []

    def begin(*flags):
        started.append(Server(tmp_path / f"server-{len(started)}", tiny_model, *flags))
        return started[-1]

    yield begin
    for server in started:
        server.stop()
