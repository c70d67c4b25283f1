"""What is read from a model folder, and every way in which a folder is refused in one line."""

import json
import re
import subprocess
import sys

import pytest
from model_folder import CONFIG, write_folder

from pdserve.errors import ModelError
from pdserve.model.spec import Rope, read_spec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TOKENIZER = {
    "added_tokens": [{"id": 7, "content": "<|end|>"}],
    "model": {"vocab": {"</s>": 5, "a": 6}},
}


def refusal(directory):
    with pytest.raises(ModelError) as caught:
        read_spec(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shapes_of_a_plain_llama_are_read(tmp_path):
    spec = read_spec(write_folder(tmp_path))
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (8, 2, 4, 2)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size, spec.rms_eps) == (2, 12, 10, 1e-5)
    assert (spec.tied_embeddings, spec.qkv_bias, spec.output_bias, spec.qk_norm) == (True, False, False, False)
    assert spec.qkv_size == 16


def test_key_heads_default_to_query_heads_and_head_dim_to_their_share(tmp_path):
    folder = write_folder(tmp_path, num_key_value_heads=4)
    config = json.loads((folder / "config.json").read_text())
    del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    assert (read_spec(folder).num_kv_heads, read_spec(folder).head_dim) == (4, 2)


def test_qwen2_has_bias_on_its_queries_keys_and_values_only(tmp_path):
    spec = read_spec(write_folder(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm) == (True, False, False)


def test_qwen3_normalizes_queries_and_keys(tmp_path):
    spec = read_spec(write_folder(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=4))
    assert (spec.qkv_bias, spec.qk_norm, spec.head_dim) == (False, True, 4)


def test_attention_bias_of_llama_covers_the_output_too(tmp_path):
    spec = read_spec(write_folder(tmp_path, attention_bias=True))
    assert (spec.qkv_bias, spec.output_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Rope(theta=10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(theta=1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(theta=10000.0, kind="linear", factor=2.0)),
        (
            {"rope_scaling": LLAMA3},
            Rope(theta=10000.0, kind="llama3", factor=8.0, high_freq_factor=4.0, original_positions=32),
        ),
        (
            {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            Rope(theta=5e5, kind="llama3", factor=8.0, high_freq_factor=4.0, original_positions=32),
        ),
    ],
)
def test_rope_is_read_from_old_and_new_configs(tmp_path, changes, expected):
    assert read_spec(write_folder(tmp_path, **changes)).rope == expected


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su"])
def test_other_rope_scalings_are_refused_by_name(tmp_path, kind):
    assert repr(kind) in refusal(write_folder(tmp_path, rope_scaling={"rope_type": kind, "factor": 2.0}))


def test_a_rotary_embedding_per_kind_of_layer_is_refused(tmp_path):
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    assert "differs between layers" in refusal(write_folder(tmp_path, rope_parameters=nested))


def test_a_partial_rotary_embedding_is_refused(tmp_path):
    assert "partial" in refusal(write_folder(tmp_path, partial_rotary_factor=0.5))


def test_a_sliding_window_limits_the_context_to_the_window(tmp_path):
    spec = read_spec(write_folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=16))
    assert (spec.max_positions, spec.sliding_window) == (16, 16)


def test_a_window_longer_than_the_context_changes_nothing(tmp_path):
    spec = read_spec(write_folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=4096))
    assert spec.max_positions == 64


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"sliding_window": 16, "use_sliding_window": False}, 64),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, 64),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16),
        ({"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 64),
        ({"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 16),
    ],
)
def test_qwens_window_counts_only_where_a_layer_uses_it(tmp_path, changes, limit):
    assert read_spec(write_folder(tmp_path, architectures=["Qwen2ForCausalLM"], **changes)).max_positions == limit


def test_end_tokens_are_the_union_of_model_generation_and_tokenizer(tmp_path):
    files = {
        "generation_config.json": {"eos_token_id": [3, 4]},
        "tokenizer_config.json": {"eos_token": {"content": "<|end|>"}},
        "special_tokens_map.json": {"eos_token": "</s>"},
        "tokenizer.json": TOKENIZER,
    }
    assert read_spec(write_folder(tmp_path, files=files)).eos_token_ids == (2, 3, 4, 5, 7)


@pytest.mark.parametrize(("value", "expected"), [(None, ()), (3, (3,)), ([3, 1], (1, 3))])
def test_end_tokens_of_a_config_may_be_none_one_or_a_list(tmp_path, value, expected):
    assert read_spec(write_folder(tmp_path, eos_token_id=value)).eos_token_ids == expected


def test_the_fingerprint_survives_a_copy_and_a_new_version_of_the_writer(tmp_path):
    first = read_spec(write_folder(tmp_path / "a", transformers_version="4.1"))
    second = read_spec(write_folder(tmp_path / "b", transformers_version="5.2"))
    assert first.fingerprint == second.fingerprint and len(first.fingerprint) == 32


def test_the_fingerprint_changes_with_weights_and_with_config(tmp_path):
    base = read_spec(write_folder(tmp_path / "a")).fingerprint
    assert read_spec(write_folder(tmp_path / "b", fill=1)).fingerprint != base
    assert read_spec(write_folder(tmp_path / "c", rope_theta=500.0)).fingerprint != base


def test_the_layout_of_the_cache_follows_from_the_spec(tmp_path):
    spec = read_spec(write_folder(tmp_path))
    assert spec.kv_layout(dtype="bfloat16", block_size=16).shape(5) == (5, 2, 2, 2, 16, 2)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not served"),
        ({"architectures": []}, "architecture unknown is not served"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not served"),
        ({"hidden_act": "gelu"}, "activation gelu is not served"),
        ({"num_attention_heads": 3, "head_dim": 2}, "3 query heads cannot share 2 key heads"),
        ({"vocab_size": 0}, "every size must be at least 1"),
        ({"eos_token_id": 10}, "end tokens [10] are not all below 10"),
        ({"hidden_size": "wide"}, "config.json is malformed"),
        ({"num_hidden_layers": 3}, None),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_in_one_line(tmp_path, changes, part):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    assert (part or "tensor model.layers.2.input_layernorm.weight is missing") in refusal(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 13}))
    assert "mlp.gate_proj.weight has shape [12, 8], not [13, 8]" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff", '"x"'])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path, text):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refusal(tmp_path)


def test_a_missing_folder_or_config_is_named(tmp_path):
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'} is not a folder"
    assert refusal(tmp_path) == f"{tmp_path}: config.json is missing"


def test_reading_a_spec_needs_no_torch(tmp_path):
    folder = write_folder(tmp_path)
    program = (
        "import sys; from pathlib import Path; import pdserve.model.store; from pdserve.model.spec import read_spec; "
        f"read_spec(Path({str(folder)!r})); print({{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    )
    search = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=search, check=True)
    assert re.fullmatch(r"set\(\)\n", done.stdout)
