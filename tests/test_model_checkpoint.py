"""Reading safetensors headers: shards, and every kind of damage as one clear line."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folder import safetensors

from pdserve.errors import ModelError
from pdserve.model.checkpoint import open_checkpoint

TENSORS = {"a": [2, 3], "b": [4]}


def write(directory, content, name="model.safetensors"):
    (directory / name).write_bytes(content)
    return directory


def refusal(directory):
    with pytest.raises(ModelError) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_shapes_and_places_are_read(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, safetensors(TENSORS)))
    assert {name: entry.shape for name, entry in checkpoint.tensors.items()} == {"a": (2, 3), "b": (4,)}
    assert checkpoint.tensors["b"].end == (tmp_path / "model.safetensors").stat().st_size


def test_indexed_shards_are_one_checkpoint(tmp_path):
    write(tmp_path, safetensors({"a": [1]}), "one.safetensors")
    write(tmp_path, safetensors({"b": [1]}), "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}


@pytest.mark.parametrize("shard", ["two.safetensors", "../one.safetensors"])
def test_a_shard_that_is_missing_or_elsewhere_is_named(tmp_path, shard):
    index = {"weight_map": {"b": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert shard in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    assert "holds no weights" in refusal(tmp_path)


def test_weights_in_another_format_are_refused_as_such(tmp_path):
    assert "only safetensors" in refusal(write(tmp_path, b"", "pytorch_model.bin"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{{",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 9) + b'{"a": {}}',
        safetensors(TENSORS)[:-1],
        safetensors({"a": [2]}).replace(b"[2]", b"[3]"),
        safetensors({"a": [2]}).replace(b"[0, 4]", b"[4, 0]"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content):
    assert "corrupt" in refusal(write(tmp_path, content))


@given(st.binary(max_size=64), st.integers(0, 200))
def test_no_bytes_make_anything_but_a_model_error(tmp_path_factory, noise, at):
    whole = safetensors(TENSORS)
    folder = write(tmp_path_factory.mktemp("damaged"), whole[:at] + noise + whole[at + len(noise) :])
    try:
        open_checkpoint(folder)
    except ModelError as error:
        assert str(error)


def test_the_digest_sees_a_change_in_the_middle_of_a_large_tensor(tmp_path):
    whole = bytearray(safetensors({"a": [100_000]}))
    before = open_checkpoint(write(tmp_path, bytes(whole))).digest()
    whole[-100_000] = 1
    assert open_checkpoint(write(tmp_path, bytes(whole))).digest() != before


def test_a_tensor_that_is_missing_has_another_shape_or_dtype_is_named(tmp_path):
    checkpoint = open_checkpoint(
        write(tmp_path, safetensors(TENSORS).replace(b'"BF16", "shape": [4]', b'"I16",  "shape": [4]'))
    )
    for needed, part in ((("c", (1,)), "c is missing"), (("a", (2, 4)), "not [2, 4]"), (("b", (4,)), "b is I16")):
        with pytest.raises(ModelError, match=part.replace("[", r"\[").replace("]", r"\]")):
            checkpoint.require([needed])
